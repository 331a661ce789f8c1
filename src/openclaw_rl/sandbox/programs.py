"""Runs Python code that a model wrote, in a process that can only compute and print.

- With seccomp (Linux on x86_64 and aarch64, also for root and in containers) the kernel guarantees: no network, no
  other process or thread, no file written or deleted, no signal to another process.
- With Landlock (Linux 5.13) the kernel also guarantees that only Python's own library can be read.
- User namespaces, where they are allowed, remove the network a second time.
- Elsewhere, as on macOS, an audit hook inside Python refuses the same actions. That is enough for a model's honest
  mistakes, not for an attacker. `fences` lists what holds on this machine.
- Everywhere: limits on CPU time, wall time and output, an empty environment, no standard input, an empty working
  folder, and the whole process group is killed at the end. Only without seccomp and as root could a
  process that got past the hook leave its group and survive.
- The memory limit holds on Linux, but not on macOS. A program can still find out which files exist.
"""

import asyncio
import contextlib
import enum
import functools
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Runs a module of `fences` with only the standard library: no site packages, no user settings, no bytecode files.
PYTHON = (sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c")
LAUNCH = "import sys; sys.path.append(sys.argv[1]); from fences.{} import {} as main; main()"
#: How often to check whether a program has ended.
POLL_SECONDS = 0.02
#: Bytes read from a pipe at a time.
READ_BYTES = 1 << 16
#: How long killed processes may take to be gone.
END_SECONDS = 5.0
#: A program that prints more bytes is killed.
MAX_OUTPUT = 1 << 18


class EndReason(enum.StrEnum):
    """Why a program ended."""

    EXITED = "exited"
    TIMED_OUT = "timed out"
    TOO_MUCH_OUTPUT = "too much output"


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """The result of a program. One that uses too much memory gets a MemoryError, which is seen in `stderr`."""

    ended: EndReason
    exit_code: int
    """The exit status, or minus the number of the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float


async def run_python(
    source: str, *, seconds: float = 10.0, memory_mib: int = 512, max_output: int = MAX_OUTPUT
) -> ProgramOutcome:
    """Run a program to its end or its limits. Its processes and files are gone when this returns or is cancelled."""
    with tempfile.TemporaryDirectory(prefix="openclaw-sandbox-") as folder:
        running = start("run_python", {"memory_mib": memory_mib}, source.encode("utf-8", "replace"), seconds, folder)
        return await to_its_end(running, seconds, max_output)


@functools.cache
def fences() -> tuple[str, ...]:
    """The fences that hold on this machine, found by a trial run: limits, namespaces, landlock, seccomp, audit hook."""
    with tempfile.TemporaryDirectory(prefix="openclaw-sandbox-") as folder:
        running = start("run_python", {"memory_mib": 512, "report": True}, b"", 10, folder)
        outcome = watch(running, seconds=10, max_output=MAX_OUTPUT)
    return tuple(json.loads(outcome.stdout)) if outcome.exit_code == 0 else ()


def start(
    module: str, settings: Mapping[str, object], stdin: bytes, seconds: float, folder: str | Path
) -> subprocess.Popen[bytes]:
    """Start a module of `fences`, which puts up the fences and then runs the program."""
    return start_program(launcher(module, settings, seconds), stdin, folder)


def launcher(module: str, settings: Mapping[str, object], seconds: float, main: str = "main") -> list[str]:
    """The command line that runs a module of `fences`; it has to be started by this process."""
    # The limit on wall time comes first; the one on CPU time is for the case that the watcher died.
    limits = {"cpu_seconds": math.ceil(seconds) + 1, "parent": os.getpid(), "report": False}
    return [*PYTHON, LAUNCH.format(module, main), str(Path(__file__).parent), json.dumps({**limits, **settings})]


def start_program(argv: Sequence[str], stdin: bytes, folder: str | Path) -> subprocess.Popen[bytes]:
    """Start a program in a session and process group of its own, with an empty environment."""
    # A file, because a pipe would have to be filled while the child reads.
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        return subprocess.Popen(
            argv,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={},
            start_new_session=True,
        )


async def to_its_end(
    running: subprocess.Popen[bytes], seconds: float, max_output: int, *, held_by_child: bool = False
) -> ProgramOutcome:
    """Wait until a program ends or reaches a limit. Its processes are gone when this returns or is cancelled.

    With `held_by_child`, all processes end with the child of the started one, which waits for that. Without it, a
    process that left the group of the program is not found.
    """
    watcher = asyncio.create_task(asyncio.to_thread(watch, running, seconds, max_output, held_by_child))
    try:
        return await asyncio.shield(watcher)
    finally:
        # When cancelled: the watcher sees the end at once and cleans up.
        if not watcher.done():
            if not (held_by_child and kill_children(running.pid)):
                kill(running)
            await watcher


async def even_if_cancelled(work: Coroutine[Any, Any, None]) -> None:
    """Await something to its end. A cancellation is passed on afterwards."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def watch(
    running: subprocess.Popen[bytes], seconds: float, max_output: int, held_by_child: bool = False
) -> ProgramOutcome:
    """Read a program's output until it ends or reaches a limit. Blocks, so it runs in a thread."""
    started = time.monotonic()
    output: dict[Any, bytearray] = {running.stdout: bytearray(), running.stderr: bytearray()}
    try:
        ended = _read_until_end(running, output, started + seconds, max_output)
    finally:
        if held_by_child and kill_children(running.pid):
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(END_SECONDS)
        kill(running)
        exit_code = running.wait()
        for pipe in output:
            pipe.close()
    texts = [bytes(output[pipe][:max_output]).decode(errors="replace") for pipe in (running.stdout, running.stderr)]
    if ended is not EndReason.EXITED:
        exit_code = -signal.SIGKILL
    return ProgramOutcome(ended, exit_code, texts[0], texts[1], time.monotonic() - started)


def _read_until_end(
    running: subprocess.Popen[bytes], output: dict[Any, bytearray], deadline: float, max_output: int
) -> EndReason:
    with selectors.DefaultSelector() as selector:
        for pipe in output:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while True:
            # Checked before reading, so that everything the program wrote is in the pipes by now.
            ended = _has_ended(running)
            for key, _ in selector.select(0 if ended else POLL_SECONDS):
                if not _read(key.fileobj, output, max_output):
                    selector.unregister(key.fileobj)
            if any(len(text) > max_output for text in output.values()):
                return EndReason.TOO_MUCH_OUTPUT
            if ended:
                return EndReason.EXITED
            if time.monotonic() > deadline:
                return EndReason.TIMED_OUT


def _read(pipe: Any, output: dict[Any, bytearray], max_output: int) -> bool:
    """Read what is in a pipe, up to the limit. False at the end of the pipe."""
    with contextlib.suppress(BlockingIOError):
        while len(output[pipe]) <= max_output:
            data = os.read(pipe.fileno(), READ_BYTES)
            if not data:
                return False
            output[pipe] += data
    return True


def _has_ended(running: subprocess.Popen[bytes]) -> bool:
    """Whether a program has ended. Where the system allows it, it is not reaped, so its process id is not reused."""
    if not hasattr(os, "waitid"):  # macOS with an older Python
        ended = running.poll() is not None
        if ended:
            _kill_group(running.pid)
        return ended
    try:
        return os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill(running: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group, unless the program was reaped already."""
    if running.returncode is None:
        _kill_group(running.pid)


def _kill_group(process: int) -> None:
    # macOS raises PermissionError for a group whose processes have all ended.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


def kill_children(process: int) -> bool:
    """Kill the child processes of a process, where the system names them. False if there are none."""
    try:
        children = [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return False
    for child in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
    return bool(children)

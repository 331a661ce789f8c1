"""Runs Python that a model wrote, in a process that can compute and print and nothing else.

Where Linux has seccomp (x86_64 and aarch64, also for root and in containers) the kernel guarantees: no network, no
other process or thread, nothing written or deleted anywhere, no signal to anybody else. With Landlock (Linux 5.13) it
also guarantees that nothing but Python's own library can be read. User namespaces, where they are allowed, take the
network away a second time. Elsewhere, as on macOS, an audit hook inside Python refuses the same things: enough for a
model's honest mistakes, not for an attacker. `fences` says which of these hold here.

Everywhere: limits of CPU time, wall time and output, an empty environment, no standard input, a working folder of its
own that is empty, and at the end the whole process group is killed; only without seccomp, and for root, could a process
that got past the hook and left its group live on. The limit of memory holds on Linux; macOS does not keep to it. What a
program can still learn is which files exist.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Runs `fences.child` with the standard library alone: no site packages, no user's settings, no files written.
PYTHON = (sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c")
LAUNCH = "import sys; sys.path.append(sys.argv[1]); from fences.child import main; main()"
#: How often to see whether a program has ended that keeps its output open.
LOOK_SECONDS = 0.02
#: Read from a pipe at once.
PIECE = 1 << 16
#: A program that prints more than this is ended.
MAX_OUTPUT = 1 << 18


class EndReason(enum.StrEnum):
    """Why a program runs no longer."""

    EXITED = "exited"
    TIMED_OUT = "timed out"
    TOO_MUCH_OUTPUT = "too much output"


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What a program did. Too much memory is a MemoryError of its own, so to be seen in `stderr`."""

    ended: EndReason
    exit_code: int
    """As the shell's, or minus the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float


async def run_python(
    source: str, *, seconds: float = 10.0, memory_mib: int = 512, max_output: int = MAX_OUTPUT
) -> ProgramOutcome:
    """Run a program to its end or to its limits. Nothing of it is left when this returns or is cancelled."""
    with tempfile.TemporaryDirectory(prefix="openclaw-sandbox-") as folder:
        running = _start(source.encode("utf-8", "replace"), seconds, memory_mib, folder)
        watched = asyncio.create_task(asyncio.to_thread(_watch, running, seconds, max_output))
        try:
            return await asyncio.shield(watched)
        finally:
            # When cancelled: the watcher sees the end at once and cleans up, before the folder goes.
            if not watched.done():
                _kill(running)
                await watched


@functools.cache
def fences() -> tuple[str, ...]:
    """The fences that hold on this machine, tried out: some of limits, namespaces, landlock, seccomp, audit hook."""
    with tempfile.TemporaryDirectory(prefix="openclaw-sandbox-") as folder:
        running = _start(b"", seconds=10, memory_mib=512, folder=folder, report=True)
        outcome = _watch(running, seconds=10, max_output=MAX_OUTPUT)
    return tuple(json.loads(outcome.stdout)) if outcome.exit_code == 0 else ()


def _start(
    source: bytes, seconds: float, memory_mib: int, folder: str, report: bool = False
) -> subprocess.Popen[bytes]:
    wanted = {
        # The clock on the wall decides first; this is for a watcher that died.
        "cpu_seconds": math.ceil(seconds) + 1,
        "memory_mib": memory_mib,
        "parent": os.getpid(),
        "report": report,
    }
    # A file, since a pipe would have to be filled while the child reads.
    with tempfile.TemporaryFile() as program:
        program.write(source)
        program.seek(0)
        return subprocess.Popen(
            [*PYTHON, LAUNCH, str(Path(__file__).parent), json.dumps(wanted)],
            stdin=program,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={},
            start_new_session=True,
        )


def _watch(running: subprocess.Popen[bytes], seconds: float, max_output: int) -> ProgramOutcome:
    """Read what a program says until it ends or must be ended. Blocks, so it has a thread of its own."""
    started = time.monotonic()
    said: dict[Any, bytearray] = {running.stdout: bytearray(), running.stderr: bytearray()}
    try:
        ended = _listen(running, said, started + seconds, max_output)
    finally:
        _kill(running)
        exit_code = running.wait()
        for pipe in said:
            pipe.close()
    texts = [bytes(said[pipe][:max_output]).decode(errors="replace") for pipe in (running.stdout, running.stderr)]
    return ProgramOutcome(ended, exit_code, texts[0], texts[1], time.monotonic() - started)


def _listen(
    running: subprocess.Popen[bytes], said: dict[Any, bytearray], deadline: float, max_output: int
) -> EndReason:
    with selectors.DefaultSelector() as selector:
        for pipe in said:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ)
        while True:
            # Looked at first: what it said before its end is then in the pipes.
            over = _is_over(running)
            for key, _ in selector.select(0 if over else LOOK_SECONDS):
                if not _hear(key.fileobj, said, max_output):
                    selector.unregister(key.fileobj)
            if any(len(words) > max_output for words in said.values()):
                return EndReason.TOO_MUCH_OUTPUT
            if over:
                return EndReason.EXITED
            if time.monotonic() > deadline:
                return EndReason.TIMED_OUT


def _hear(pipe: Any, said: dict[Any, bytearray], max_output: int) -> bool:
    """Take what is in a pipe, up to the limit; False at its end."""
    with contextlib.suppress(BlockingIOError):
        while len(said[pipe]) <= max_output:
            piece = os.read(pipe.fileno(), PIECE)
            if not piece:
                return False
            said[pipe] += piece
    return True


def _is_over(running: subprocess.Popen[bytes]) -> bool:
    """Whether a program has ended. It stays unburied, so that its number can be nobody else's."""
    try:
        return os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill(running: subprocess.Popen[bytes]) -> None:
    """End the whole process group, unless it is buried already."""
    if running.returncode is None:
        # macOS says of a group of the dead that it may not be killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal.SIGKILL)

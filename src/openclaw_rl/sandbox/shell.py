"""A shell in a sandbox that keeps its state between commands."""

import asyncio
import contextlib
import os
import shlex
import signal
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from openclaw_rl.aio import start_process, wait_at_most
from openclaw_rl.sandbox.base import Allowance, Sandbox, give_folder, new_name, new_scratch_folder, remove_folder
from openclaw_rl.sandbox.programs import END_SECONDS, even_if_cancelled, kill_children

#: CPU time of one process of a shell; the time of each command is limited too.
SHELL_CPU_SECONDS = 600
#: How the shell is started. The standard error of the shell's process carries statuses, see `_request`.
BASH = ("bash", "--norc", "--noprofile")
#: Pagers and questions would wait for a person.
PRELUDE = "exec 3>&2 2>&1; export TERM=dumb PAGER=cat GIT_PAGER=cat GIT_TERMINAL_PROMPT=0; umask 022; unset HISTFILE\n"
#: A command that prints more bytes is ended.
MAX_PRINTED = 8 << 20
#: Bytes of an output that are kept, the beginning and the end, unless the caller says otherwise.
MAX_KEPT = 16_000
READ_BYTES = 1 << 16
#: Rounds of the event loop without new output after which a pipe is empty: a paused pipe is read again in the third.
IDLE_ROUNDS = 4
#: How long a shell may take to start.
START_SECONDS = 30.0
#: How much is repeated of what a shell said that could not be started.
MAX_ERROR = 400
#: The status of a shell that was killed, in the words of a shell.
KILLED_STATUS = 128 + signal.SIGKILL


@dataclass(frozen=True, slots=True)
class ShellResult:
    """What a command did."""

    output: str
    """Standard output and error, in the order in which they were written; the middle of a long one is cut."""
    exit_code: int | None
    """None if the command was ended."""
    timed_out: bool = False
    flooded: bool = False
    """It printed too much and was ended."""
    shell_ended: bool = False
    """The shell is gone: variables and background jobs are lost. The next command starts a new one."""


class Shell:
    """A bash in a folder of a sandbox. Its process starts with its first command; it has to be closed.

    - Working directory, variables, functions and background jobs stay from command to command.
    - A command has no input. One that runs for too long or prints too much is ended with the whole shell.
    - After the end of a shell, also by `exit`, the next command starts a new one, in the last working directory.
    - `close`, which also runs if a command is cancelled, ends all processes and deletes temporary files. Where the
      sandbox has a space of its own for processes, they are gone when it returns.
    - The time of a command does not include the start of the shell. A shell that cannot be started raises OSError.

    What a command does to its own shell can only spoil later outputs: outcomes have to be read from the folder.
    """

    def __init__(self, sandbox: Sandbox, folder: Path, *, memory_mib: int = 512, network: bool = False) -> None:
        self.sandbox = sandbox
        self.folder = folder
        self._limits = (memory_mib, network)
        self._directory = str(folder)
        self._scratch: Path | None = None
        self._allowance: Allowance | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, command: str, seconds: float = 10.0, max_output: int = MAX_KEPT) -> ShellResult:
        """Run a command, which may have several lines."""
        process = self._process or await self._start()
        token = uuid4().hex
        kept = _Kept(max_output)
        try:
            async with asyncio.timeout(seconds):
                status = await _finish(process, _request(command, token), token, kept)
        except TimeoutError:
            await self._end(kept)
            return ShellResult(kept.text(), None, timed_out=True, shell_ended=True)
        except asyncio.CancelledError:
            await self.close()
            raise
        if status is None:
            flooded = kept.printed > MAX_PRINTED
            exit_code = await self._end(kept, ends_itself=not flooded)
            return ShellResult(kept.text(), None if flooded else exit_code, flooded=flooded, shell_ended=True)
        self._directory = status.directory
        return ShellResult(kept.text(), status.exit_code)

    async def close(self) -> None:
        """End all processes and delete temporary files, also if this is cancelled."""
        await even_if_cancelled(self._close())

    async def _close(self) -> None:
        await self._end(_Kept(0))
        if self._scratch is not None:
            scratch = self._scratch
            self._scratch = None
            await asyncio.to_thread(remove_folder, scratch)

    async def _start(self) -> asyncio.subprocess.Process:
        self._scratch = self._scratch or new_scratch_folder()
        give_folder(self.folder)
        memory_mib, network = self._limits
        self._allowance = Allowance(self.folder, self._scratch, SHELL_CPU_SECONDS, memory_mib, (), network, new_name())
        self._process = process = await start_process(
            *self.sandbox.command_line(BASH, self._allowance),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.folder,
            env={},
            start_new_session=True,
            limit=READ_BYTES,
        )
        token = uuid4().hex
        kept = _Kept(MAX_ERROR)
        begin = f"{PRELUDE}cd -- {shlex.quote(self._directory)}\n".encode("utf-8", "replace")
        status = None
        try:
            async with asyncio.timeout(START_SECONDS):
                status = await _finish(process, begin + _request("true", token), token, kept)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            await self.close()
            raise
        if status is None:
            await self._end(kept)
            raise OSError(f"the sandbox {self.sandbox.name} cannot start a shell: {kept.text().strip()}")
        return process

    async def _end(self, kept: "_Kept", *, ends_itself: bool = False) -> int:
        """End the shell with all its processes, and read what is left of its output. The status of the shell."""
        process = self._process
        self._process = None
        if process is None:
            return KILLED_STATUS
        if ends_itself:
            await wait_at_most(END_SECONDS, process.wait())
        await self._kill(process)
        assert self._allowance is not None
        await asyncio.to_thread(self.sandbox.end, self._allowance)
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                # The end of the output: every process that could write to it is gone.
                await asyncio.gather(_drain(process.stdout, kept), _drain(process.stderr, kept=None), process.wait())
        # asyncio has no other way to close the pipes that a process which left the sandbox may still hold.
        process._transport.close()  # type: ignore[attr-defined]
        code = process.returncode
        return KILLED_STATUS if code is None else code if code >= 0 else 128 - code

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        """Kill all processes of a shell."""
        held = self.sandbox.held_by_child and kill_children(process.pid)
        if held:
            await wait_at_most(END_SECONDS, process.wait())
        if process.returncode is None or not held:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Status:
    exit_code: int
    directory: str


class _Kept:
    """The beginning and the end of an output, of bounded size."""

    def __init__(self, at_most: int) -> None:
        self.printed = 0
        self._half = at_most // 2
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.printed += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: max(len(self._tail) - self._half, 0)]

    def text(self) -> str:
        missing = self.printed - len(self._head) - len(self._tail)
        between = f"\n[… {missing} bytes cut …]\n".encode() if missing else b""
        return (bytes(self._head) + between + bytes(self._tail)).decode("utf-8", "replace")


def _request(command: str, token: str) -> bytes:
    """What the shell reads for a command: the command without an input, then a report of its status.

    The report goes to a descriptor that the command does not have, so its output cannot be taken for a report.
    """
    quoted = shlex.quote(command.replace("\0", ""))
    report = f'builtin printf \'%s %s %s\\0\' {token} "$?" "$PWD" >&3'
    return f"eval {quoted} </dev/null 3>&-; {report}\n".encode("utf-8", "replace")


async def _finish(process: asyncio.subprocess.Process, request: bytes, token: str, kept: _Kept) -> _Status | None:
    """Send a request and read until its report; None if the shell has ended, or printed too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    reading = asyncio.create_task(_read(process.stdout, kept))
    reporting = asyncio.create_task(_report(process.stderr, token))
    try:
        process.stdin.write(request)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        # A background job keeps the output open, and an ended shell closes both.
        await asyncio.wait({reading, reporting}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and kept.printed > MAX_PRINTED:
            return None
        status = await reporting
        await _until_idle(kept)
    finally:
        for task in (reading, reporting):
            task.cancel()
        await asyncio.gather(reading, reporting, return_exceptions=True)
    return status


async def _read(stream: asyncio.StreamReader | None, kept: _Kept) -> None:
    """Read until the end, or until too much was printed."""
    assert stream is not None
    while kept.printed <= MAX_PRINTED and (data := await stream.read(READ_BYTES)):
        kept.add(data)


async def _drain(stream: asyncio.StreamReader | None, kept: _Kept | None) -> None:
    """Read until the end."""
    assert stream is not None
    while data := await stream.read(READ_BYTES):
        if kept is not None:
            kept.add(data)


async def _until_idle(kept: _Kept) -> None:
    """Let the loop read what the command has written before its report: it is in the pipe or in a buffer."""
    idle = 0
    while idle < IDLE_ROUNDS and kept.printed <= MAX_PRINTED:
        printed = kept.printed
        await asyncio.sleep(0)
        idle = idle + 1 if kept.printed == printed else 0


async def _report(stream: asyncio.StreamReader, token: str) -> _Status | None:
    """The report of a request; None at the end of the stream. Whatever else is on the stream is skipped."""
    while True:
        try:
            line = await stream.readuntil(b"\0")
        except asyncio.IncompleteReadError:
            return None
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(max(error.consumed, 1))
            continue
        parts = line.rstrip(b"\0").decode("utf-8", "surrogateescape").split(" ", 2)
        if len(parts) == 3 and parts[0].endswith(token) and parts[1].isdecimal():
            return _Status(int(parts[1]), parts[2])

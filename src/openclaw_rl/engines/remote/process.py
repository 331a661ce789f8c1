"""The process of a server that we start ourselves, here or through a launcher."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from openclaw_rl.aio import start_process, wait_at_most
from openclaw_rl.engines.local.process.launcher import Launcher, WorkerLink
from openclaw_rl.engines.remote.guard import end_group

#: The end of a server's log that is shown if it does not start.
LOG_LINES = 12
#: Time that the server gets to exit by itself; its guard then kills it.
EXIT_SECONDS = 25.0
GUARD = (sys.executable, "-m", "openclaw_rl.engines.remote.guard")
#: How often the worker looks at whether the server has ended.
POLL_SECONDS = 0.2


class ServerProcess:
    """Starts a server any number of times. Its output goes to a file, whose path messages name.

    The server and all processes that it starts end with this process, also after kill -9 (see `guard`). It counts as
    running until they have ended, also if its guard was killed.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = list(command)
        self.environment = dict(environment)
        handle, path = tempfile.mkstemp(prefix=f"openclaw-rl-{name}-", suffix=".log")
        os.close(handle)
        self.log = Path(path)
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._watching is not None and not self._watching.done()

    @property
    def guard_pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await start_process(
                *GUARD,
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._watching = asyncio.create_task(watch_guard(self._process))

    async def wait(self) -> None:
        """Return when the server has ended."""
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def stop(self) -> None:
        """End the server and wait for its end."""
        if self._process is None or not self.running:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        await wait_at_most(EXIT_SECONDS, self._process.wait())
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self.wait()

    def remove_log(self) -> None:
        self.log.unlink(missing_ok=True)

    def why_it_ended(self) -> str:
        """The end of its log, and where the rest is."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = "\n".join(lines[-LOG_LINES:])
        return f"The {self.name} server ended.\nIts log is {self.log}, which ends with:\n{last}"


async def watch_guard(guard: asyncio.subprocess.Process) -> None:
    """Return when the guard has ended and no process of the server is left."""
    assert guard.stdout is not None
    told = await guard.stdout.readline()
    await asyncio.to_thread(end_orphans, told, await guard.wait())


def end_orphans(told: bytes, returncode: int) -> None:
    """If a guard was killed, end the processes of the server whose group it has told."""
    if returncode < 0 and told:
        end_group(int(told))


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What the worker runs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class PlacedServerProcess(ServerProcess):
    """Implements `ServerProcess` with a worker. It runs on this machine, because servers listen on loopback only.

    The server ends with the worker, however that ends, and the worker ends with this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], launcher: Launcher) -> None:
        super().__init__(name, command, environment)
        self._launcher = launcher
        self._link: WorkerLink | None = None

    async def start(self) -> None:
        self._link = self._launcher.start(__name__, ServerCommand(self.command, self.environment, self.log), "")
        self._watching = asyncio.create_task(watch(self._link))

    async def stop(self) -> None:
        if self._link is not None:
            await self._link.close(EXIT_SECONDS)
            await self.wait()

    def why_it_ended(self) -> str:
        how = f"{self._link.end}\n" if self._link is not None and self._link.end else ""
        return how + super().why_it_ended()


async def watch(link: WorkerLink) -> None:
    """Return when the worker is gone."""
    async for _ in link.reports():
        pass
    await link.close()


def main(connection: Connection, server: ServerCommand) -> None:
    """The worker: run the server until the connection closes. If this process is killed, the guard ends the server."""
    with server.log.open("ab") as log:
        guard = subprocess.Popen(
            [*GUARD, *server.command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        told = guard.stdout.readline()
        while guard.poll() is None and not connection.poll(POLL_SECONDS):
            pass
    finally:
        guard.stdin.close()
    end_orphans(told, guard.wait())
    sys.exit(guard.returncode)

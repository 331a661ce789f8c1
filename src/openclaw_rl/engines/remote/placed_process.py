"""A server that a launcher places, such as an actor of a Ray cluster that runs it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from openclaw_rl.engines.local.process.launcher import Launcher, WorkerLink
from openclaw_rl.engines.remote.process import EXIT_SECONDS, GUARD, ServerProcess

#: How often the worker looks at whether the server has ended.
POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """What the worker runs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class PlacedServerProcess(ServerProcess):
    """Implements `ServerProcess` with a worker. It runs beside this process, because servers listen on loopback only.

    The server ends with the worker, however that ends, and the worker ends with this process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], launcher: Launcher) -> None:
        super().__init__(name, command, environment)
        self._launcher = launcher
        self._link: WorkerLink | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._watching is not None and not self._watching.done()

    async def start(self) -> None:
        self._link = self._launcher.start(__name__, ServerCommand(self.command, self.environment, self.log), "")
        self._watching = asyncio.create_task(watch(self._link))

    async def wait(self) -> None:
        if self._watching is not None:
            await asyncio.shield(self._watching)

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
            stdout=log,
            stderr=log,
            env={**os.environ, **server.environment},
            start_new_session=True,
        )
    assert guard.stdin is not None
    try:
        while guard.poll() is None and not connection.poll(POLL_SECONDS):
            pass
    finally:
        guard.stdin.close()
    sys.exit(guard.wait())

"""The process of a server that we start ourselves."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from openclaw_rl.aio import start_process

#: The end of a server's log that is shown if it does not start.
LOG_LINES = 12
#: Time that the server gets to exit by itself; its guard then kills it.
EXIT_SECONDS = 25.0
GUARD = (sys.executable, "-m", "openclaw_rl.engines.remote.guard")


class ServerProcess:
    """Starts a server any number of times. Its output goes to a file, whose path messages name.

    The server and all processes that it starts end with this process, also after kill -9 (see `guard`).
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.command, self.environment = name, list(command), dict(environment)
        handle, path = tempfile.mkstemp(prefix=f"openclaw-rl-{name}-", suffix=".log")
        os.close(handle)
        self.log = Path(path)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def guard_pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = await start_process(
                *GUARD,
                *self.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    async def wait(self) -> None:
        """Return when the server has ended."""
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """End the server and wait for its end."""
        if self._process is None or not self.running:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def remove_log(self) -> None:
        self.log.unlink(missing_ok=True)

    def why_it_ended(self) -> str:
        """The end of its log, and where the rest is."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = "\n".join(lines[-LOG_LINES:])
        return f"The {self.name} server ended.\nIts log is {self.log}, which ends with:\n{last}"

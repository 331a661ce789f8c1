"""The process that runs a verifiers environment, seen from our side."""

import asyncio
import collections
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

from openclaw_rl.aio import start_process, wait_at_most
from openclaw_rl.errors import UserError

RUNNER = Path(__file__).with_name("runner.py")
#: The variable that holds the server's key. Arguments of a process can be read by others.
KEY_VARIABLE = "OPENCLAW_RL_API_KEY"
#: A line is one attempt. The runner writes no longer ones.
MAX_LINE_BYTES = 1_000_000
#: The last lines of the runner's log explain why it ended.
KEPT_LOG_LINES = 5
#: How long the process may take to end before it is killed.
EXIT_SECONDS = 10.0


def find_python(given: str | None) -> str:
    """The interpreter that has verifiers. Raises UserError."""
    places = (
        [Path(given)] if given else [Path(".venv-verifiers/bin/python"), Path(sys.prefix + "-verifiers/bin/python")]
    )
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return str(place.absolute())
    if given:
        raise UserError(f"--verifiers-python {given} is not a program: give the Python that has verifiers.")
    raise UserError(
        "verifiers needs an environment of its own: run `make verifiers` in the checkout, or give "
        "--verifiers-python, the interpreter of an environment with verifiers 0.4."
    )


class RunnerProcess:
    """A running verifiers environment.

    - Its standard output is read line by line. Its log goes to standard error, which is kept in part.
    - It ends, with all processes that it started, when this side leaves the context or is gone.
    """

    def __init__(self, name: str, python: str, settings: Mapping[str, Any], key: str) -> None:
        self.name = name
        self.python = python
        self.settings = settings
        self.key = key
        self._log: collections.deque[str] = collections.deque(maxlen=KEPT_LOG_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        try:
            self._process = await start_process(
                self.python,
                str(RUNNER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                env={**os.environ, KEY_VARIABLE: self.key},
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{self.python} cannot be started: {error.strerror}.") from None
        self._tasks.append(asyncio.create_task(self._keep_log()))
        await self._write(json.dumps({**self.settings, "key_variable": KEY_VARIABLE}))
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._running()
        self._close_input()
        await wait_at_most(EXIT_SECONDS, process.wait())
        # Also after its end: processes that it started may be left in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        for task in self._tasks:
            task.cancel()

    async def allow_group(self) -> None:
        """Let one more group begin."""
        await self._write("group")

    async def end_after_groups(self) -> None:
        """Let no further group begin. The process ends when those that have begun have ended."""
        await self._write("end")

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """What the runner says, until it ends. Raises UserError if it fails."""
        process = self._running()
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                yield json.loads(line)
        except ValueError as error:
            raise UserError(
                f"The runner of verifiers:{self.name} wrote something that is not a result: {error}."
            ) from None
        if await process.wait():
            # The reader of the log may be a moment behind.
            await asyncio.wait(self._tasks, timeout=1)
            reason = next((line for line in reversed(self._log) if line.strip()), "it said nothing")
            raise UserError(f"The environment verifiers:{self.name} failed: {reason}")

    async def _keep_log(self) -> None:
        process = self._running()
        assert process.stderr is not None
        while chunk := await process.stderr.read(MAX_LINE_BYTES):
            self._log.extend(chunk.decode(errors="replace").splitlines())

    async def _write(self, line: str) -> None:
        process = self._running()
        assert process.stdin is not None
        # A runner that is gone is noticed where its lines are read.
        with contextlib.suppress(ConnectionError):
            process.stdin.write(f"{line}\n".encode())
            await process.stdin.drain()

    def _close_input(self) -> None:
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

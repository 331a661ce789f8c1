"""Runs `openclaw-rl serve` as a child process, so that demos and evaluations measure what users run."""

import asyncio
import contextlib
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from openclaw_rl.aio import start_process
from openclaw_rl.client import probe
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.run_dir import server_url

T = TypeVar("T")

#: How long a server may take to start. The first start converts the model.
MAX_START_SECONDS = 900.0
#: How long a server may take to save and exit.
MAX_STOP_SECONDS = 120.0
#: How long a busy server may take to answer a request for its status.
MAX_STATE_SECONDS = 30.0
#: How often to check whether a server is ready.
POLL_SECONDS = 0.2
LOG = "server.log"
#: The owner who operates a server that several people use.
WATCHER = "watcher"


class ServerFailed(UserError):
    """The server did not start, or stopped answering. The message names its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready."""

    url: str
    run_dir: Path
    key: str = ""
    """A key of its API, if it has any."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Those of its people."""

    async def state(self) -> Mapping[str, Any]:
        """The server's status: policy version, judge, learner. Raises ServerFailed."""
        state = await probe(self.url, self.key, seconds=MAX_STATE_SECONDS)
        if not state:
            raise failed(self.run_dir, "The server no longer answers")
        return state


async def wait_while(
    busy: Callable[[T], bool],
    ask: Callable[[], Awaitable[T]],
    seconds: float,
    watch: Callable[[T], None] = lambda _state: None,
    poll_seconds: float = POLL_SECONDS,
) -> T:
    """Wait while a state is busy, at most so long; the last state. `watch` is called with those before it."""
    end = time.monotonic() + seconds
    while busy(state := await ask()) and time.monotonic() <= end:
        watch(state)
        await asyncio.sleep(poll_seconds)
    return state


def is_judging(state: Mapping[str, Any]) -> bool:
    return bool((state.get("queue") or {}).get("to_judge"))


def started_with(run_dir: Path, flags: Sequence[str]) -> list[str]:
    """The arguments with which `run_server` starts a server."""
    return ["--run-dir", str(run_dir), "--proxy-port", "0", "--no-environment", "--stop-with-input", *flags]


@contextlib.asynccontextmanager
async def run_server(
    run_dir: Path, *flags: str, start_seconds: float = MAX_START_SECONDS, people: Sequence[str] = ()
) -> AsyncIterator[RunningServer]:
    """Run `openclaw-rl serve` on a free local port until the context ends. Raises ServerFailed.

    Each of `people` gets a key. The server's own key is then that of a watcher, who operates it and sees all.
    The flags are its only options: of the environment it reads keys of engines alone. If this process is killed, the
    server stops too.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    keys = {name: secrets.token_hex(16) for name in ((WATCHER, *people) if people else ())}
    given = ("--api-key", ",".join(f"{name}={key}" for name, key in keys.items())) if keys else ()
    command = [sys.executable, "-m", "openclaw_rl", "serve", *started_with(run_dir, (*flags, *given))]
    with (run_dir / LOG).open("ab") as log:
        # In a session of its own, so that Ctrl-C does not reach the server: the caller stops it in order.
        process = await start_process(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield RunningServer(await ready(process, run_dir, start_seconds), run_dir, keys.get(WATCHER, ""), keys)
    finally:
        await stop(process)


async def ready(process: asyncio.subprocess.Process, run_dir: Path, seconds: float) -> str:
    """Wait until the server is ready; its address. Raises ServerFailed."""
    end = time.monotonic() + seconds
    while process.returncode is None and time.monotonic() < end:
        url = server_url(run_dir)
        if url and (await probe(url)).get("ready"):
            return url
        await asyncio.sleep(POLL_SECONDS)
    timed_out = process.returncode is None
    raise failed(run_dir, "The server did not become ready" if timed_out else "The server did not start")


async def stop(process: asyncio.subprocess.Process) -> None:
    """Let the server save and exit; kill it if it takes too long."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(MAX_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def failed(run_dir: Path, what: str) -> ServerFailed:
    """The error, with the last line of the server's log that is not empty."""
    path = run_dir / LOG
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    last = f" Its last line: {lines[-1]}" if lines else ""
    return ServerFailed(f"{what}: see {path}.{last}")

"""A server of this package as a child process: what is shown and measured is what people run."""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from openclaw_rl.client import ready_state
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.lock import server_url

#: How long a server may take until it answers: the first start converts the model.
START_SECONDS = 900.0
#: How long it may take to save what it has learned.
STOP_SECONDS = 120.0
#: How long a busy server may take to say how it is.
STATE_SECONDS = 30.0
LOOK_SECONDS = 0.2
LOG = "server.log"


class ServerFailed(UserError):
    """The server did not start, or is gone; the message says where its log is."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    url: str
    run_dir: Path

    async def state(self) -> Mapping[str, Any]:
        """What it says of itself: policy version, judge, learner. Raises ServerFailed."""
        state = await asyncio.to_thread(ready_state, self.url, STATE_SECONDS)
        if not state:
            raise failed(self.run_dir, "The server does not answer any more")
        return state


@contextlib.asynccontextmanager
async def run_server(run_dir: Path, *flags: str) -> AsyncIterator[RunningServer]:
    """`openclaw-rl serve` with a free port on this machine, for as long as the context lasts. Raises ServerFailed.

    Its options are the flags alone.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    own = ("--run-dir", str(run_dir), "--proxy-port", "0", "--no-environment")
    command = [sys.executable, "-m", "openclaw_rl", "serve", *own, *flags]
    with (run_dir / LOG).open("ab") as log:
        # A session of its own: Ctrl-C is for whoever asked for the server, who then stops it in order.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield RunningServer(await ready(process, run_dir), run_dir)
    finally:
        await stop(process)


@contextlib.contextmanager
def stoppable(console: Console) -> Iterator[None]:
    """What somebody may end early: Ctrl-C stops it and its servers in order, and is no error.

    SIGTERM is as Ctrl-C from here on, also afterwards.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("Stopped.")


async def ready(process: asyncio.subprocess.Process, run_dir: Path) -> str:
    """The server's address, once it answers. Raises ServerFailed."""
    end = time.monotonic() + START_SECONDS
    while process.returncode is None and time.monotonic() < end:
        url = server_url(run_dir)
        if url and (await asyncio.to_thread(ready_state, url)).get("ready"):
            return url
        await asyncio.sleep(LOOK_SECONDS)
    late = process.returncode is None
    raise failed(run_dir, "The server does not become ready" if late else "The server did not start")


async def stop(process: asyncio.subprocess.Process) -> None:
    """Let it save and end; one that does not is killed."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def failed(run_dir: Path, what: str) -> ServerFailed:
    """With the last line of its log that says something."""
    path = run_dir / LOG
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    last = f" Its last words: {lines[-1]}" if lines else ""
    return ServerFailed(f"{what}: see {path}.{last}")

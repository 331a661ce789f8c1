"""One worker process and the pipe to it, for an event loop.

Nothing here blocks the loop: commands leave through a thread, reports come in when the pipe is readable.
"""

import asyncio
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

Command = TypeVar("Command")
Report = TypeVar("Report")

#: Time a worker gets to leave by itself once its pipe is closed.
EXIT_SECONDS = 5.0
#: How PyTorch's threads on a CPU wait for each other. They wait spinning, by default for long: as good as any way
#: where a process has the cores for itself, but two processes then take each other's time for nothing.
WAIT_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def run_worker(connection: Connection, module: str, options: object) -> None:
    """Entry of a worker process. The import is here so that the server never loads PyTorch."""
    # Ctrl-C is for the server, which then ends this process; importing PyTorch takes seconds in which it may come.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Drivers and kernels can crash without a word; this way the server's log has the line where they did.
    faulthandler.enable()
    importlib.import_module(module).main(connection, options)


@contextlib.contextmanager
def waiting(spins: int) -> Iterator[None]:
    """Processes that are started here get this patience, unless the owner has chosen how threads wait."""
    if any(name in os.environ for name in WAIT_SETTINGS):
        yield
        return
    os.environ[WAIT_SETTINGS[0]] = str(spins)
    try:
        yield
    finally:
        del os.environ[WAIT_SETTINGS[0]]


class Link(Generic[Command, Report]):
    """A running worker. Closing it, or the end of this process, ends the worker."""

    def __init__(self, module: str, options: object, spins: int) -> None:
        """Run `main(connection, options)` of a module in a process of its own.

        Its threads turn `spins` times, waiting for each other, before they leave their core to somebody else.
        """
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        name = f"openclaw-rl-{module.rpartition('.')[2]}"
        self.process: BaseProcess = context.Process(
            target=run_worker, args=(theirs, module, options), name=name, daemon=True
        )
        with waiting(spins):
            self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"{name}-commands", daemon=True)
        self._sender.start()
        self._arrived: asyncio.Queue[Report | None] = asyncio.Queue()
        self._given_up = False

    @property
    def end(self) -> str:
        """How the process ended, in a sentence; empty while it runs, and where it left in order or by our hand."""
        code = self.process.exitcode
        if not code or self._given_up:
            return ""
        if code == -signal.SIGKILL:
            return "It was ended by SIGKILL, which systems send when memory runs out."
        return f"It was ended by {signal.Signals(-code).name}." if code < 0 else f"It left with exit code {code}."

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    async def reports(self) -> AsyncIterator[Report]:
        """What the worker says, until it is gone."""
        loop, pipe = asyncio.get_running_loop(), self.connection.fileno()

        def readable() -> None:
            try:
                self._arrived.put_nowait(self.connection.recv())
            except (EOFError, OSError):
                loop.remove_reader(pipe)
                self._arrived.put_nowait(None)

        loop.add_reader(pipe, readable)
        try:
            while (report := await self._arrived.get()) is not None:
                yield report
        finally:
            # Once it is closed, the number may be that of the next worker's pipe.
            if not self.connection.closed:
                loop.remove_reader(pipe)

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        """Close the pipe, which tells the worker to leave, and see it gone."""
        self._outbox.put(None)
        if not self.connection.closed:
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            self.connection.close()
        self._arrived.put_nowait(None)
        await asyncio.to_thread(self.process.join, patience)
        if self.process.exitcode is None:
            self._given_up = True
            self.process.kill()
            await asyncio.to_thread(self.process.join)

    def _send_all(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self.connection.send(command)
            except OSError:
                return  # the worker is gone; the reader sees that too and tells everyone

"""How a worker is started, and what the server needs of one that runs.

A worker is a process on this machine (`Link`) or an actor of a Ray cluster (`engines.ray`). Nothing else of sampler and
learner knows how their workers run. Nothing here blocks the event loop: a thread sends the commands, and reports are
read when the pipe is readable.
"""

import asyncio
import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

from openclaw_rl.engines.local.process.worker_messages import LOOPBACK

Command = TypeVar("Command")
Report = TypeVar("Report")
#: Tells a worker to end early what it computes, and to let it rest.
STOP_SIGNAL, PAUSE_SIGNAL = signal.SIGUSR1, signal.SIGUSR2
#: How often a worker that rests looks whether it may go on.
REST_SECONDS = 0.01
#: Time that a worker gets to exit by itself once its pipe is closed.
EXIT_SECONDS = 5.0
#: How PyTorch's threads on a CPU wait for each other. By default they spin for long. That is harmless where a process
#: has the cores to itself; but two processes then waste each other's time.
WAIT_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def run_worker(connection: Connection, module: str, options: object, is_paused: Any = None) -> None:
    """Entry of a worker process. The import is here so that the server never loads PyTorch."""
    # Ctrl-C is for the server, which then ends this process. Importing PyTorch takes seconds in which it may come; and
    # so may the order to stop a step, when there is none yet.
    for number in (signal.SIGINT, STOP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    if is_paused is not None:
        signal.signal(PAUSE_SIGNAL, partial(rest, is_paused, os.getppid()))
    # Drivers and kernels can crash without a message; this writes the line at fault to the server's log.
    faulthandler.enable()
    # PyTorch reads it when it is imported: operators that an Apple GPU lacks are then computed on the CPU.
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    # What is imported stays. The garbage collector looks at it neither now nor later.
    gc.disable()
    main = importlib.import_module(module).main
    gc.freeze()
    gc.enable()
    main(connection, options)


def rest(is_paused: Any, server: int, *_: object) -> None:
    """Compute nothing until the server says so, or is gone. A signal's handler, so that work goes on where it was."""
    while is_paused.value and os.getppid() == server:
        time.sleep(REST_SECONDS)


@contextlib.contextmanager
def spin_count(spins: int) -> Iterator[None]:
    """Processes that are started in this block spin this often, unless the user has set how threads wait."""
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

    def __init__(self, module: str, options: object, spins: int, context: Any = None) -> None:
        """Run `main(connection, options)` of a module in a new process.

        Its threads spin `spins` times, waiting for each other, before they give up their core. `context` is that of
        multiprocessing; by default a process is spawned, because a fork of a process with threads may hang.
        """
        context = context or multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        # A flag instead of a second signal: a handler that rests may never learn of a signal that came with the first.
        self._is_paused = context.RawValue("b", 0)
        name = f"openclaw-rl-{module.rpartition('.')[2]}"
        self.process: BaseProcess = context.Process(
            target=run_worker, args=(theirs, module, options, self._is_paused), name=name, daemon=True
        )
        with spin_count(spins):
            self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name=f"{name}-commands", daemon=True)
        self._sender.start()
        self._arrived: asyncio.Queue[Report | None] = asyncio.Queue()
        self._killed = False

    @property
    def pids(self) -> list[int]:
        return [] if self.process.pid is None else [self.process.pid]

    @property
    def nodes(self) -> list[str]:
        return []

    @property
    def end(self) -> str:
        """How the process ended, in a sentence; empty while it runs, if it exited in order, and if we killed it."""
        code = self.process.exitcode
        if not code or self._killed:
            return ""
        if code == -signal.SIGKILL:
            return "It was ended by SIGKILL, which systems send when memory runs out."
        return f"It was ended by {signal.Signals(-code).name}." if code < 0 else f"It left with exit code {code}."

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def interrupt(self) -> None:
        """Send the process `STOP_SIGNAL`."""
        self.pause(paused=False)
        self._signal(STOP_SIGNAL)

    def pause(self, *, paused: bool) -> None:
        """Let the process rest between two operations, or go on."""
        was_paused, self._is_paused.value = bool(self._is_paused.value), paused
        if paused and not was_paused:
            self._signal(PAUSE_SIGNAL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.is_alive():
            for pid in self.pids:
                os.kill(pid, number)

    async def reports(self) -> AsyncIterator[Report]:
        """The reports of the worker, until it is gone."""
        loop = asyncio.get_running_loop()
        pipe = self.connection.fileno()

        def readable() -> None:
            try:
                self._arrived.put_nowait(self.connection.recv())
            except (EOFError, OSError):
                loop.remove_reader(pipe)
                self._arrived.put_nowait(None)

        loop.add_reader(pipe, readable)
        # uvloop makes it non-blocking. Then a message that arrives in pieces, or does not fit into the pipe, is lost.
        os.set_blocking(pipe, True)
        try:
            while (report := await self._arrived.get()) is not None:
                yield report
        finally:
            # Once the pipe is closed, its number may be that of the next worker's pipe.
            if not self.connection.closed:
                loop.remove_reader(pipe)

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        """Close the pipe, which tells the worker to exit, and wait until it has; after `patience` seconds, kill it."""
        self._outbox.put(None)
        if not self.connection.closed:
            asyncio.get_running_loop().remove_reader(self.connection.fileno())
            await self._hang_up()
        self._arrived.put_nowait(None)
        await asyncio.to_thread(self.process.join, patience)
        if self.process.exitcode is None:
            self._killed = True
            self.process.kill()
            await asyncio.to_thread(self.process.join)

    async def _hang_up(self) -> None:
        """Close the pipe, but not under the thread that may be sending: its number may soon be another pipe's."""
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe, contextlib.suppress(OSError):
            pipe.shutdown(socket.SHUT_RDWR)  # wakes the thread, and fails if the worker is gone
        await asyncio.to_thread(self._sender.join)
        self.connection.close()

    def _send_all(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self.connection.send(command)
            except OSError:
                return  # the worker is gone; the reader notices it too and reports it


class WorkerLink(Protocol):
    """A running worker.

    - Commands arrive in the order in which they are sent, and sending never blocks.
    - `reports` ends when the worker is gone, for whatever reason.
    - The worker ends when the link is closed, and when the server's process ends.
    """

    @property
    def pids(self) -> list[int]:
        """Its processes on this machine."""

    @property
    def nodes(self) -> list[str]:
        """The nodes of the cluster that it runs on, as far as they are known; none where there is no cluster."""

    @property
    def end(self) -> str:
        """How it ended, in a sentence; empty while it runs, if it ended in order, and if `close` killed it."""

    def send(self, command: Any) -> None: ...

    def reports(self) -> AsyncIterator[Any]:
        """What the worker reports, until it is gone. Called once."""

    def interrupt(self) -> None:
        """Have the worker end its step early (`STOP_SIGNAL`, to a process). Does nothing if it is gone."""

    def pause(self, *, paused: bool) -> None:
        """Let the worker rest while it makes a step, or go on, if it computes on this machine."""

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        """Let the worker exit; after `patience` seconds, kill it. Returns when it is gone."""


class Launcher(Protocol):
    """Starts workers."""

    @property
    def meeting_host(self) -> str:
        """Where the first of several ranks waits for the others; empty: at the address of its own machine."""

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        """Run `main(connection, arguments)` of the module `target` in a new worker that may use `device`.

        `connection` has `send` and `recv` as a pipe has: `recv` raises EOFError when the link is closed. Raises
        OSError if no worker can be started.
        """


class ProcessLauncher:
    """Starts workers as processes on this machine. They choose their device themselves, from their arguments."""

    meeting_host = LOOPBACK

    def __init__(self, spins: int) -> None:
        """`spins`: how often a worker's threads look for each other before they give up their core."""
        self.spins = spins

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return Link(target, arguments, self.spins)


def on_nodes(nodes: Sequence[str]) -> str:
    """The nodes that workers run on, as a phrase that begins with a space; empty where there is no cluster."""
    shown = nodes[:1] if len(set(nodes)) == 1 else nodes
    return f" at {', '.join(shown)}" if shown else ""

"""Starts workers as actors of a Ray cluster, and keeps the connections to them."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

from openclaw_rl.engines.host import host_id
from openclaw_rl.engines.local.process.launcher import WorkerLink
from openclaw_rl.engines.local.process.link import EXIT_SECONDS
from openclaw_rl.engines.ray.actor import Assignment, Placed
from openclaw_rl.engines.ray.calls import WORK, CalledEnd, Reception
from openclaw_rl.engines.ray.cluster import RayTrouble, Room, RunningActor

log = logging.getLogger(__name__)

#: How often a thread that waits for a worker looks at whether Ray has lost it.
LOOK_SECONDS = 1.0
#: A worker that has closed its connection has so long to end.
LEAVE_SECONDS = 20.0


class RayLauncher:
    """Implements `Launcher` with one room of a cluster."""

    meeting_host = ""

    def __init__(self, room: Room, spins: int) -> None:
        self.room, self.spins = room, spins

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return RayLink(self.room, target, arguments, self.spins)


class RayLink:
    """Implements `WorkerLink` with an actor.

    - Nothing blocks the event loop: a thread has the actor placed, waits for its call and reads its reports.
    - If the actor's process or node is lost, the reports end.
    """

    def __init__(self, room: Room, target: str, arguments: object, spins: int) -> None:
        self._room, self._place = room, room.take()
        self._work = (target, arguments, spins)
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ends: dict[bytes, CalledEnd] = {}
        self._placed: Placed | None = None
        self._end = ""
        self._patience: float | None = None
        """Once it is being closed: how long the worker has to end by itself."""
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name=f"ray-{room.needs.role}-{self._place}", daemon=True).start()

    @property
    def pids(self) -> list[int]:
        is_here = self._placed is not None and self._placed.host == host_id()
        return [self._placed.pid] if self._placed is not None and is_here else []

    @property
    def nodes(self) -> list[str]:
        return [self._placed.node] if self._placed is not None else []

    @property
    def end(self) -> str:
        return self._end if self._is_over.is_set() else ""

    def send(self, command: Any) -> None:
        self._outbox.put((command,))

    def interrupt(self) -> None:
        for purpose, end in list(self._ends.items()):
            if purpose != WORK:
                with contextlib.suppress(OSError):
                    end.connection.send_bytes(b"stop")

    async def reports(self) -> AsyncIterator[Any]:
        while (report := await self._arrived.get()) is not None:
            yield report

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        self._patience = patience
        for end in list(self._ends.values()):
            end.hang_up()
        self._arrived.put_nowait(None)
        await asyncio.to_thread(self._is_over.wait)

    def _is_wanted(self) -> bool:
        return self._patience is None

    def _run(self) -> None:
        """The worker from its start to its end."""
        try:
            self._end = self._run_actor()
        except RayTrouble as error:
            self._end = str(error)
        except Exception as error:
            log.exception("A worker on the Ray cluster failed.")
            self._end = f"Ray failed: {error!r}."
        finally:
            self._outbox.put(None)
            for end in self._ends.values():
                end.close()
            self._room.leave(self._place)
            self._is_over.set()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._arrived.put_nowait, None)

    def _run_actor(self) -> str:
        """How the worker ended."""
        self._room.reserve(self._is_wanted)
        if not self._is_wanted():
            return ""
        target, arguments, spins = self._work
        with contextlib.closing(Reception(self._room.cluster.this_node())) as reception:
            assignment = Assignment(reception.address, target, arguments, spins, self._room.uses_gpus)
            actor = self._room.start(self._place, assignment)
            self._wait_for_calls(reception, actor)
        if len(self._ends) == 2 and self._is_wanted():
            threading.Thread(target=self._send_all, name=f"ray-commands-{self._place}", daemon=True).start()
            self._read_all(actor)
        return actor.end(LEAVE_SECONDS if self._patience is None else self._patience)

    def _wait_for_calls(self, reception: Reception, actor: RunningActor) -> None:
        while len(self._ends) < 2 and self._is_wanted():
            called = reception.accept(LOOK_SECONDS)
            if called is not None:
                self._ends[called[0]] = called[1]
            elif actor.is_gone():
                return

    def _read_all(self, actor: RunningActor) -> None:
        """Pass reports on until the connection closes or Ray has lost the actor."""
        connection = self._ends[WORK].connection
        try:
            while True:
                if connection.poll(LOOK_SECONDS):
                    report = connection.recv()
                    if isinstance(report, Placed):
                        self._placed = report
                    else:
                        self._loop.call_soon_threadsafe(self._arrived.put_nowait, report)
                elif actor.is_gone():
                    return
        except (EOFError, OSError):
            return

    def _send_all(self) -> None:
        connection = self._ends[WORK].connection
        while (item := self._outbox.get()) is not None:
            try:
                connection.send(item[0])
            except OSError:
                return  # the worker is gone; the reading thread notices it too

"""Starts workers as actors of a Ray cluster, in rooms, which are placement groups, and keeps the links to them."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from openclaw_rl.engines.host import host_id
from openclaw_rl.engines.local.process.launcher import EXIT_SECONDS, WorkerLink
from openclaw_rl.engines.ray.actor import WORK, Assignment, CalledEnd, Placed, Reception, WorkerActor, node_address

log = logging.getLogger(__name__)
#: How long workers wait for room on the cluster, and when the log says so for the first time.
PLACE_SECONDS = 600.0
WARN_SECONDS = 10.0
#: How often waiting looks at whether it is still wanted: whole seconds, which Ray wants.
LOOK_SECONDS = 1
#: How long Ray may take to end an actor that it was told to kill.
KILL_SECONDS = 30.0
#: A share of a node's own resource, which places a worker on that node.
NODE_SHARE = 0.001
#: How often a thread that waits for a worker looks at whether Ray has lost it.
CONNECT_SECONDS = 1.0
#: A worker that has closed its connection has so long to end.
LEAVE_SECONDS = 20.0


class RayTrouble(Exception):
    """The cluster cannot do what is needed; a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What each worker of a room asks Ray for."""

    role: str
    workers: int
    cpus: int
    gpus: int | None
    """None: one, if the cluster has any."""
    on_this_node: bool = False
    """Whether it has to run on the server's node."""


class RayCluster:
    """The connection to a cluster, made at its first use. From then on, what actors print is printed here."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._groups: list[Any] = []
        self._is_connected = False

    def connect(self) -> Any:
        """The module `ray`, connected. Raises RayTrouble.

        Never called in the main thread: there Ray would take over SIGTERM, which the server handles.
        """
        # It would warn of exactly that.
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        import ray

        with self._lock:
            if not self._is_connected:
                try:
                    ray.init(address=self.address or "auto", configure_logging=False)
                except (ConnectionError, RuntimeError, ValueError) as error:
                    reason = str(error).strip().partition("\n")[0]
                    raise RayTrouble(
                        f"There is no Ray cluster at {self.address or 'the address of RAY_ADDRESS'} ({reason}): start "
                        "one with 'ray start --head', or give --ray-address."
                    ) from None
                self._is_connected = True
        return ray

    def this_node(self) -> str:
        """The address of the node that the server runs on."""
        self.connect()
        return node_address()

    def has_gpus(self) -> bool:
        return bool(self.connect().cluster_resources().get("GPU"))

    def make_group(self, bundles: list[dict[str, float]], name: str) -> Any:
        """A placement group: what it holds is packed on as few nodes as possible, and moves when a node is lost."""
        self.connect()
        from ray.util.placement_group import placement_group

        group = placement_group(bundles, strategy="PACK", name=name)
        self._groups.append(group)
        return group

    async def close(self) -> None:
        if self._is_connected:
            await asyncio.to_thread(self._disconnect)

    def _disconnect(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)
        ray.shutdown()


class Room:
    """Place on the cluster for the workers of one role, reserved from the first start to the server's end.

    If a node is lost, Ray makes room on another one, and a worker that is started again runs there.
    """

    def __init__(self, cluster: RayCluster, needs: Needs) -> None:
        self.cluster = cluster
        self.needs = needs
        self._free = set(range(needs.workers))
        self._lock = threading.Lock()
        self._group: Any = None
        self._gpus = 0

    def take(self) -> int:
        """The lowest free place."""
        with self._lock:
            place = min(self._free)
            self._free.remove(place)
        return place

    def leave(self, place: int) -> None:
        with self._lock:
            self._free.add(place)

    @property
    def uses_gpus(self) -> bool:
        """Known once `reserve` has returned."""
        return self._gpus > 0

    def reserve(self, is_wanted: Callable[[], bool]) -> None:
        """Return when there is room for all workers, or when it is not wanted any more. Raises RayTrouble."""
        with self._lock:
            if self._group is None:
                self._group = self.cluster.make_group(self._bundles(), f"openclaw-rl-{self.needs.role}")
        start = time.monotonic()
        warned = False
        while is_wanted() and not self._group.wait(LOOK_SECONDS):
            waited = time.monotonic() - start
            if waited > PLACE_SECONDS:
                raise RayTrouble(f"{self._lack()} It was waited for {PLACE_SECONDS:.0f} s.")
            if waited > WARN_SECONDS and not warned:
                warned = True
                log.warning("%s Waiting for it.", self._lack())

    def start(self, place: int, assignment: Assignment) -> "RunningActor":
        """Start an actor at a place. Raises RayTrouble."""
        ray = self.cluster.connect()
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        actor = (
            ray.remote(WorkerActor)
            .options(num_cpus=self.needs.cpus, num_gpus=self._gpus, scheduling_strategy=strategy, max_restarts=0)
            .remote()
        )
        return RunningActor(ray, actor, actor.work.remote(assignment))

    def _bundles(self) -> list[dict[str, float]]:
        needs = self.needs
        self._gpus = int(self.cluster.has_gpus()) if needs.gpus is None else needs.gpus
        bundle: dict[str, float] = {"CPU": needs.cpus}
        if self._gpus:
            bundle["GPU"] = self._gpus
        if needs.on_this_node:
            bundle[f"node:{self.cluster.this_node()}"] = NODE_SHARE
        return [dict(bundle) for _ in range(needs.workers)]

    def _lack(self) -> str:
        ray = self.cluster.connect()
        free = ray.available_resources()
        total = ray.cluster_resources()
        asked = {"CPU": self.needs.cpus, "GPU": self._gpus}
        each = " and ".join(f"{name} {count}" for name, count in asked.items() if count)
        has = ", ".join(f"{name} {total.get(name, 0):g} ({free.get(name, 0):g} free)" for name in asked)
        where = " on the server's own node" if self.needs.on_this_node else ""
        many = f"{self.needs.workers} × {each}" if self.needs.workers > 1 else each
        return f"The {self.needs.role} needs {many}{where}, and the Ray cluster has {has}."


class RunningActor:
    """An actor that was started, or will be when there is room."""

    def __init__(self, ray: Any, actor: Any, result: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._result = result

    def is_gone(self, seconds: float = 0.0) -> bool:
        """Whether it has ended or been lost, after waiting for it for so long."""
        done, _ = self._ray.wait([self._result], timeout=seconds)
        return bool(done)

    def end(self, seconds: float) -> str:
        """Let it end within so many seconds, or kill it. Returns how it ended, unless it did so in order."""
        if not self.is_gone(seconds):
            self._ray.kill(self._actor)
            self.is_gone(KILL_SECONDS)
            return ""
        try:
            code = self._ray.get(self._result)
        except self._ray.exceptions.RayError as error:
            return f"Ray says: {last_line(str(error))}"
        # Its process would wait for further work.
        self._ray.kill(self._actor)
        return f"It left with exit code {code}." if code else ""


def last_line(text: str) -> str:
    return [line.strip() for line in text.splitlines() if line.strip()][-1]


class RayLauncher:
    """Implements `Launcher` with one room of a cluster."""

    meeting_host = ""

    def __init__(self, room: Room, spins: int) -> None:
        self.room = room
        self.spins = spins

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return RayLink(self.room, target, arguments, self.spins)


class RayLink:
    """Implements `WorkerLink` with an actor.

    - Nothing blocks the event loop: a thread has the actor placed, waits for its call and reads its reports.
    - If the actor's process or node is lost, the reports end.
    """

    def __init__(self, room: Room, target: str, arguments: object, spins: int) -> None:
        self._room = room
        self._place = room.take()
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

    def pause(self, *, paused: bool) -> None:
        """The cluster gives it its place for itself."""

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
            called = reception.accept(CONNECT_SECONDS)
            if called is not None:
                self._ends[called[0]] = called[1]
            elif actor.is_gone():
                return

    def _read_all(self, actor: RunningActor) -> None:
        """Pass reports on until the connection closes or Ray has lost the actor."""
        connection = self._ends[WORK].connection
        try:
            while True:
                if connection.poll(CONNECT_SECONDS):
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

"""A Ray cluster: the connection to it, and rooms for workers, which are placement groups."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openclaw_rl.engines.ray.actor import Assignment, WorkerActor, node_address

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
    """Whether it has to run beside the server."""


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
        self.cluster, self.needs = cluster, needs
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
        start, warned = time.monotonic(), False
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
        free, total = ray.available_resources(), ray.cluster_resources()
        asked = {"CPU": self.needs.cpus, "GPU": self._gpus}
        each = " and ".join(f"{name} {count}" for name, count in asked.items() if count)
        has = ", ".join(f"{name} {total.get(name, 0):g} ({free.get(name, 0):g} free)" for name in asked)
        where = " on the server's own node" if self.needs.on_this_node else ""
        many = f"{self.needs.workers} × {each}" if self.needs.workers > 1 else each
        return f"The {self.needs.role} needs {many}{where}, and the Ray cluster has {has}."


class RunningActor:
    """An actor that was started, or will be when there is room."""

    def __init__(self, ray: Any, actor: Any, result: Any) -> None:
        self._ray, self._actor, self._result = ray, actor, result

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

"""The actor: a process that Ray starts on some node of the cluster, where it becomes a worker."""

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection

from openclaw_rl.engines.host import host_id
from openclaw_rl.engines.local.process.link import STOP_SIGNAL, WAIT_SETTINGS, run_worker
from openclaw_rl.engines.ray.calls import ORDERS, WORK, CallBack, call


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker's first report: where it runs."""

    node: str
    host: str
    """See `host_id`."""
    pid: int


@dataclass(frozen=True, slots=True)
class Assignment:
    """What an actor is to do."""

    server: CallBack
    target: str
    """A module with `main(connection, arguments)`."""
    arguments: object
    spins: int
    """How often threads look for each other before they give up their core."""
    uses_gpu: bool


class WorkerActor:
    """Runs one worker. Ray ends the actor's process with the server's."""

    def work(self, assignment: Assignment) -> int:
        """Be the worker until its connection closes. Returns the exit code that its process would have."""
        if not any(name in os.environ for name in WAIT_SETTINGS):
            os.environ[WAIT_SETTINGS[0]] = str(assignment.spins)
        if not assignment.uses_gpu:
            # Ray does not hide GPUs from those who asked for none.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        signal.signal(STOP_SIGNAL, signal.SIG_IGN)
        with contextlib.closing(call(assignment.server, WORK)) as connection:
            orders = call(assignment.server, ORDERS)
            threading.Thread(target=pass_on, args=(orders,), name="orders", daemon=True).start()
            connection.send(Placed(self.node(), host_id(), os.getpid()))
            try:
                run_worker(connection, assignment.target, assignment.arguments)
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else 1
        return 0

    def node(self) -> str:
        """The address of the node that it runs on."""
        return node_address()


def node_address() -> str:
    """The address that Ray has for the node of this process."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def pass_on(orders: Connection) -> None:
    """Turn each order to end a step into the signal that a worker expects."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            orders.recv_bytes()
            os.kill(os.getpid(), STOP_SIGNAL)

"""A room of a cluster without Ray: its actors are processes on this machine."""

import multiprocessing
import signal
from multiprocessing.process import BaseProcess

from openclaw_rl.engines.ray.actor import Assignment, CallBack, WorkerActor
from openclaw_rl.engines.ray.launcher import Needs, RayCluster, RayTrouble, Room, RunningActor

NODE = "127.0.0.1"


class OneNode(RayCluster):
    """Implements the part of `RayCluster` that links use."""

    def this_node(self) -> str:
        return NODE


class ProcessActor(RunningActor):
    """Implements `RunningActor` with a process."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def is_gone(self, seconds: float = 0.0) -> bool:
        self.process.join(seconds)
        return self.process.exitcode is not None

    def end(self, seconds: float) -> str:
        if not self.is_gone(seconds):
            self.process.kill()
            self.process.join()
            return ""
        code = self.process.exitcode
        return f"Ray says: {signal.Signals(-code).name}" if code and code < 0 else ""


class RoomDouble(Room):
    """Implements `Room`. With `trouble`, it has no room."""

    def __init__(self, workers: int = 1, trouble: str = "") -> None:
        super().__init__(OneNode(""), Needs("test", workers, 1, 0))
        self.trouble = trouble
        self.callers: list[CallBack] = []
        self.actors: list[ProcessActor] = []

    def reserve(self, is_wanted: object) -> None:
        if self.trouble:
            raise RayTrouble(self.trouble)

    def start(self, place: int, assignment: Assignment) -> RunningActor:
        process = multiprocessing.get_context("spawn").Process(target=act, args=(assignment,), daemon=True)
        process.start()
        self.callers.append(assignment.server)
        self.actors.append(ProcessActor(process))
        return self.actors[-1]


class ActorDouble(WorkerActor):
    """Implements `WorkerActor` without Ray."""

    def node(self) -> str:
        return NODE


def act(assignment: Assignment) -> None:
    ActorDouble().work(assignment)

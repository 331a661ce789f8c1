"""A rank of the learner that ends itself with SIGKILL at a place, if a file says so."""

import functools
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from openclaw_rl.engines.local.process import learner_worker
from openclaw_rl.engines.local.process.launcher import WorkerLink
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions
from openclaw_rl.engines.local.training import blocks, policy_trainer, trainer
from support.rank_processes import FastLauncher


class FaultyLauncher(FastLauncher):
    """Starts ranks that die at the places for which there is a file `PLACE-NUMBER` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return super().start(__name__, (arguments, self.folder), device)

    def arm(self, place: str, number: int) -> None:
        (self.folder / f"{place}-{number}").touch()


def main(connection: Connection, arguments: tuple[LearnerOptions, Path]) -> None:
    options, folder = arguments
    assert options.place is not None
    number = options.place.number

    def die(place: str) -> None:
        flag = folder / f"{place}-{number}"
        if flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            die(place)
            return result

        return call

    changes = [
        ("forward", trainer, "block"),
        ("optimiser", torch.optim.AdamW, "step"),
        ("save", policy_trainer, "write_tensors"),
    ]
    for place, owner, name in changes:
        setattr(owner, name, dying(place, getattr(owner, name)))
    blocks._Project.backward = staticmethod(dying("backward", blocks._Project.backward))  # type: ignore[method-assign]
    learner_worker.main(connection, options)

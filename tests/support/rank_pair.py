"""Two processes that are ranks of one group and train together, for many trainings one after the other."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from openclaw_rl.engines.base import EngineError
from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions, Meeting, RankPlace
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.losses.custom_loss import LossFailed
from openclaw_rl.types import TrainingSequence
from support.rank_processes import fast_context

RANKS = 2
#: A rank that is short of memory has room for micro-batches of so many tokens.
ROOM = 32
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@dataclass(frozen=True)
class Training:
    """Load a model, train on batches, and save."""

    options: LearnerOptions
    batches: list[list[TrainingSequence]]
    saved: Path
    shards: bool = False
    free: int | None = None
    """Bytes that are free on the machine before each pass, if it is not what the machine has."""
    resumed: Path | None = None
    """The checkpoint to begin with."""
    fault: str = ""
    """The name of a function of this module, which changes the trainer of the second rank."""


class Trained(NamedTuple):
    passes: list[Any]
    """What each pass and its update measured."""
    weight_bytes: int
    recomputed: int
    """How often a layer was set to be computed twice."""
    gathered: int
    """How often FSDP gathered the weights of a module."""


def train(trainer: PolicyTrainer, job: Training) -> Trained:
    if job.resumed is not None:
        trainer.load(job.resumed)
    if job.free is not None:
        trainer.trainer.free = lambda _: job.free
    passes: list[Any] = []
    with (
        counted(trainer.trainer, "_recomputed_layers", int) as recomputed,
        counted(dist, "all_gather_single") as gathers,
    ):
        for number, batch in enumerate(job.batches):
            trainer.snapshot(str(number))
            for _ in range(job.options.training.epochs):
                passes.append((trainer.forward_backward(batch), trainer.optim_step()))
            passes[-1] = (*passes[-1], trainer.score(batch), trainer.score(batch[:1], base=True))
    trainer.save(job.saved, 7)
    return Trained(passes, trainer.weight_bytes, sum(recomputed), sum(gathers))


@contextlib.contextmanager
def counted(owner: Any, name: str, count: Callable[[Any], int] = lambda _: 1) -> Iterator[list[int]]:
    """A list that gets a number for the result of each call of a function."""
    function = getattr(owner, name)
    numbers: list[int] = []

    def call(*args: Any, **given: Any) -> Any:
        result = function(*args, **given)
        numbers.append(count(result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield numbers


def short_in_forward(trainer: PolicyTrainer) -> None:
    """The second layer does not fit, unless micro-batches are small."""
    block, calls = trainer.trainer._block, [0]

    def cramped(*args: Any) -> Tensor:
        calls[0] += 1
        if calls[0] % 2 == 0 and trainer.trainer.micro_batch_tokens > ROOM:
            raise NO_MEMORY
        return block(*args)

    trainer.trainer._block = cramped  # type: ignore[method-assign]


def short_in_backward(trainer: PolicyTrainer) -> None:
    """The gradient of a layer does not fit, unless micro-batches are small."""
    block = trainer.trainer._block

    def fail(_: Tensor) -> None:
        raise NO_MEMORY

    def cramped(*args: Any) -> Tensor:
        result = block(*args)
        if result.requires_grad and trainer.trainer.micro_batch_tokens > ROOM:
            result.register_hook(fail)
        return result

    trainer.trainer._block = cramped  # type: ignore[method-assign]


def short_while_whole(trainer: PolicyTrainer) -> None:
    """A layer does not fit while the others stay whole."""
    block, model = trainer.trainer._block, trainer.weights.decoder(trainer.decoder)

    def cramped(*args: Any) -> Tensor:
        if not isinstance(model, Decoder) and model._stays_whole:
            raise NO_MEMORY
        return block(*args)

    trainer.trainer._block = cramped  # type: ignore[method-assign]


def short_in_optimiser(trainer: PolicyTrainer) -> None:
    def fail() -> None:
        raise NO_MEMORY

    trainer.optimizer.step = fail  # type: ignore[method-assign, assignment]


def stopped(trainer: PolicyTrainer) -> None:
    """It is told to stop while it computes its first micro-batch; the other rank is not told."""
    accumulate = trainer.trainer._accumulate

    def stop(*args: Any) -> Any:
        trainer.stop()
        return accumulate(*args)

    trainer.trainer._accumulate = stop  # type: ignore[method-assign]


def failing_loss(trainer: PolicyTrainer) -> None:
    class Failing:
        kl_coef = 0.0

        def per_token(self, *_: Any) -> None:
            raise LossFailed("the custom loss failed: no such thing")

    trainer.trainer.loss = Failing()  # type: ignore[assignment]


def unreadable(trainer: PolicyTrainer) -> None:
    """It cannot read checkpoints."""

    def fail(folder: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(folder))

    trainer._read_weights = fail  # type: ignore[method-assign]


def main(connection: Connection, number: int) -> None:
    """A rank: train until the pipe closes."""
    from openclaw_rl.engines.local.process import rank_worker
    from openclaw_rl.engines.local.training.rank_group import RankGroup, join

    place = RankPlace(number, RANKS, shards=False)
    groups = {False: join(place, rank_worker.CPU, connection)}
    groups[True] = RankGroup(replace(place, shards=True), rank_worker.CPU)
    with contextlib.suppress(EOFError):
        while True:
            job: Training = connection.recv()
            groups[True].sharded_models.clear()
            trainer = rank_worker.load_rank(job.options, groups[job.shards], torch.float32, None)
            if job.fault and number == 1:
                globals()[job.fault](trainer)
            try:
                connection.send(train(trainer, job))
            except (EngineError, OSError) as error:
                connection.send(error)


class RankPair:
    """Two ranks on the CPU."""

    def __init__(self) -> None:
        context = fast_context()
        self.connections: list[Connection] = []
        self.processes = []
        for number in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=main, args=(theirs, number), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        meeting = self.connections[0].recv()
        assert isinstance(meeting, Meeting)
        self.connections[1].send(meeting)

    def train(self, job: Training) -> list[Any]:
        """What each rank returned, or its error."""
        for connection in self.connections:
            connection.send(job)
        return [connection.recv() for connection in self.connections]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def rank_pair() -> Iterator[RankPair]:
    pair = RankPair()
    try:
        yield pair
    finally:
        pair.close()

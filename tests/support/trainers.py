"""Whole training steps of the local engine in the test's own process, and batches for them."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from openclaw_rl.engines.base import (
    LearnerCapabilities,
    PassResult,
    PolicyRef,
    SpanLogprobs,
    StepResult,
    WeightForm,
    policy_in,
)
from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.engines.transaction import TransactionalLearner
from openclaw_rl.types import Span, TrainingSequence
from support.training_settings import taken_out

VOCABULARY = 200
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def trained_lora(decoder: LanguageModel, **options: Any) -> LoraWeights:
    """An adapter that changes all that it can, experts too: its B factors are not zero."""
    options.setdefault("experts", any(module.experts for module in decoder.shape.adaptable))
    lora = LoraWeights.create(decoder.shape, rank=4, alpha=9, seed=1, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for b in lora.b.values():
            b.normal_(0, 0.1, generator=generator)
    return lora


class InProcessPrimitives:
    """Implements `TrainingPrimitives` with a trainer in this process."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self.trainer = trainer

    @property
    def capabilities(self) -> LearnerCapabilities:
        return LearnerCapabilities(frozenset([WeightForm.PEFT if self.trainer.options.rank else WeightForm.MODEL]))

    @property
    def has_dropout(self) -> bool:
        return bool(self.trainer.weights.dropout)

    def describe(self) -> str:
        return "in this process"

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def reset(self) -> None:
        self.trainer.reset()

    def stop_step(self) -> None:
        self.trainer.stop()

    def pause_step(self, *, paused: bool) -> None: ...

    async def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        return self.trainer.forward_backward(sequences)

    async def optim_step(self) -> float:
        return self.trainer.optim_step()

    async def snapshot(self) -> str:
        name = uuid4().hex
        self.trainer.snapshot(name)
        return name

    async def restore(self, snapshot: str) -> None:
        self.trainer.restore(snapshot)

    async def score(self, sequences: Sequence[TrainingSequence], *, base: bool = False) -> SpanLogprobs:
        return self.trainer.score(sequences, base=base)

    async def write_policy(self, folder: Path) -> PolicyRef:
        self.trainer.write_policy(folder)
        return policy_in(folder)

    async def save(self, folder: Path, steps: int, *, lasting: bool = True) -> None:
        self.trainer.save(folder, steps)

    async def load(self, folder: Path) -> int:
        return self.trainer.load(folder)


class InProcessLearner:
    """A `Learner` without a process of its own, for tests that are not asynchronous."""

    def __init__(self, decoder: Decoder, options: LearnerOptions) -> None:
        self.trainer = PolicyTrainer(decoder, options)
        self.transaction = TransactionalLearner(InProcessPrimitives(self.trainer), options.training)

    @property
    def steps(self) -> int:
        return self.transaction.steps

    def change_training(self, **changes: Any) -> None:
        training = dataclasses.replace(self.trainer.options.training, **changes)
        self.trainer.options = dataclasses.replace(self.trainer.options, training=training)
        self.transaction.settings = training

    def reset(self) -> None:
        asyncio.run(self.transaction.reset())

    def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        return asyncio.run(self.transaction.step(sequences))

    def undo(self) -> None:
        asyncio.run(self.transaction.undo())

    def write_policy(self, folder: Path) -> PolicyRef:
        return asyncio.run(self.transaction.write_policy(folder))

    def save(self, folder: Path) -> None:
        asyncio.run(self.transaction.save(folder))

    def load(self, folder: Path) -> None:
        asyncio.run(self.transaction.load(folder))


def options(**given: Any) -> LearnerOptions:
    values: dict[str, Any] = {
        "model": Path("unused"),
        "device": "cpu",
        "dtype": "float32",
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.0,
        "modules": MODULES,
        "training": given.pop("training", None) or taken_out(given),
        "micro_batch_tokens": 64,
        "offload": False,
        "base_model": "tiny",
    }
    return LearnerOptions(**{**values, **given})


def batch(
    learner: InProcessLearner, seed: int = 0, count: int = 4, advantage: float | None = None
) -> list[TrainingSequence]:
    """Random conversations, with the learner's log-probs as if it had just sampled them."""
    draw = random.Random(seed)
    sequences = []
    for number in range(count):
        length = draw.randint(8, 30)
        start = draw.randint(2, length - 2)
        value = draw.choice([-1.0, 1.0]) if advantage is None else advantage
        nothing = [0.0] * (length - start)
        span = Span(number, start, length, nothing, [value] * (length - start))
        sequences.append(TrainingSequence([draw.randrange(VOCABULARY) for _ in range(length)], [span]))
    return fresh(learner, sequences)


def fresh(learner: InProcessLearner, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The same sequences, with the learner's log-probs as the old ones."""
    scores = learner.trainer.score(sequences)
    return [
        dataclasses.replace(
            sequence,
            spans=[
                dataclasses.replace(span, old_logprobs=old) for span, old in zip(sequence.spans, spans, strict=True)
            ],
        )
        for sequence, spans in zip(sequences, scores, strict=True)
    ]


def state(learner: InProcessLearner, folder: Path) -> dict[str, bytes]:
    """Everything that the next step depends on, as bytes."""
    folder.mkdir(exist_ok=True)
    learner.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def trained(decoder: Decoder, steps: int = 2, **given: Any) -> InProcessLearner:
    learner = InProcessLearner(decoder, options(**given))
    for seed in range(steps):
        learner.step(batch(learner, seed))
    return learner

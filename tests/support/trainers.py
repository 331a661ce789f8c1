"""Options of a learner for the tiny model, batches for it to train on, and its state as bytes."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.engines.local.process.learner_messages import LearnerOptions
from openclaw_rl.engines.local.training.policy_trainer import PolicyTrainer
from openclaw_rl.types import Span, TrainingSequence
from support.training_settings import taken_out

VOCABULARY = 200
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def options(**given: Any) -> LearnerOptions:
    """Options for a small learner on the CPU; the given values replace the usual ones."""
    values: dict[str, Any] = {
        "model": Path("unused"),
        "device": "cpu",
        "dtype": "float32",
        "rank": 4,
        "alpha": 8.0,
        "dropout": 0.0,
        "modules": MODULES,
        "training": taken_out(given),
        "micro_batch_tokens": 64,
        "checkpointing": False,
        "offload": False,
        "base_model": "tiny",
    }
    return LearnerOptions(**{**values, **given})


def batch(
    trainer: PolicyTrainer, seed: int = 0, count: int = 4, advantage: float | None = None
) -> list[TrainingSequence]:
    """Random sequences whose old log-probs the trainer computed, as if it had just sampled them."""
    draw = random.Random(seed)
    sequences = []
    for number in range(count):
        length = draw.randint(8, 30)
        start = draw.randint(2, length - 2)
        value = draw.choice([-1.0, 1.0]) if advantage is None else advantage
        unknown = [0.0] * (length - start)
        span = Span(number, start, length, unknown, [value] * (length - start))
        sequences.append(TrainingSequence([draw.randrange(VOCABULARY) for _ in range(length)], [span]))
    return fresh(trainer, sequences)


def fresh(trainer: PolicyTrainer, sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The sequences with the trainer's current log-probs as the old ones."""
    refreshed = []
    for sequence, logprobs in zip(sequences, trainer.trainer.score(sequences), strict=True):
        pairs = zip(sequence.spans, logprobs, strict=True)
        spans = [dataclasses.replace(span, old_logprobs=current) for span, current in pairs]
        refreshed.append(dataclasses.replace(sequence, spans=spans))
    return refreshed


def state(trainer: PolicyTrainer, folder: Path) -> dict[str, bytes]:
    """Everything that the trainer saves, as bytes by file name."""
    folder.mkdir(exist_ok=True)
    trainer.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}

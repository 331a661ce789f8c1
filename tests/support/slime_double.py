"""A double of the parts of slime that a rollout function meets: its types, and what it does with the samples.

Names and rules are those of slime in August 2026: which lists must have which lengths, that the first sample decides
about optional fields, and that samples beyond the last whole global batch are cut off.
"""

import argparse
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


def install(patch: pytest.MonkeyPatch) -> None:
    """Let `import slime` find the double."""
    base_types, sample_types = types.ModuleType("slime.rollout.base_types"), types.ModuleType("slime.utils.types")
    base_types.RolloutFnTrainOutput, sample_types.Sample = RolloutFnTrainOutput, Sample  # type: ignore[attr-defined]
    for name in ("slime", "slime.rollout", "slime.utils"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    patch.setitem(sys.modules, "slime.rollout.base_types", base_types)
    patch.setitem(sys.modules, "slime.utils.types", sample_types)


def arguments(**given: Any) -> argparse.Namespace:
    """slime's arguments as our command line sets them."""
    values: dict[str, Any] = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 1,
        "global_batch_size": 2,
        "rewards_normalization": False,
        "advantage_estimator": "grpo",
        "rollout_temperature": 1.0,
        "use_opd": True,
        "opd_kl_coef": 1.0,
        "use_rollout_logprobs": True,
    }
    return argparse.Namespace(**{**values, **given})


@dataclass
class Trained:
    """What slime's loss sees of a sample."""

    sample: Sample
    loss_mask: list[int]
    advantages: list[float]


def train(output: RolloutFnTrainOutput, args: argparse.Namespace) -> list[Trained]:
    """Check the samples as slime does, and compute the advantage of each response token."""
    assert all(isinstance(group, list) for group in output.samples)
    samples = [sample for group in output.samples for sample in group]
    whole = len(samples) // args.global_batch_size * args.global_batch_size
    assert whole, "not enough samples for a global batch"
    return [trained(sample, samples, args) for sample in samples[:whole]]


def trained(sample: Sample, samples: Sequence[Sample], args: argparse.Namespace) -> Trained:
    length = sample.response_length
    assert 0 < length < len(sample.tokens)
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    assert len(mask) == length
    for name in ("rollout_log_probs", "teacher_log_probs"):
        # slime asks the first sample whether all have it.
        if getattr(samples[0], name) is not None:
            assert len(getattr(sample, name)) == length, name
    assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
    assert sample.weight_versions
    assert isinstance(sample.reward, float)
    advantages = [sample.reward] * length
    if args.use_opd:
        assert sample.teacher_log_probs is not None
        assert sample.rollout_log_probs is not None
        gaps = [x - y for x, y in zip(sample.rollout_log_probs, sample.teacher_log_probs, strict=True)]
        advantages = [advantage - args.opd_kl_coef * gap for advantage, gap in zip(advantages, gaps, strict=True)]
    return Trained(sample, [0] * length if sample.remove_sample else mask, advantages)

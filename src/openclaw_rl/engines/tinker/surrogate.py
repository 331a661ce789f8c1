"""Policy losses and their slopes from log-probs that the service returns.

Without PyTorch, which the server's process does not load; `losses.policy` is the same with gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.types import MAX_LOG_RATIO, LossSettings, TrainingSequence

Table = NDArray[np.float64]


class Surrogate(NamedTuple):
    """A loss of tokens, in any shape."""

    loss: Table
    slope: Table
    """By their log-probs."""
    clipped: NDArray[np.bool_]
    """Where the clip holds a token back."""


class Measured(NamedTuple):
    """A batch's loss, and how many of its tokens the clip held back."""

    loss: float
    clipped: int


def surrogate(settings: LossSettings, new: Any, old: Any, advantages: Any, kind: str = "") -> Surrogate:
    """The settings' loss, or that of another kind with their bounds, of tokens with these log-probs."""
    new, old, advantages = np.asarray(new, np.float64), np.asarray(old, np.float64), np.asarray(advantages, np.float64)
    gap, kind = new - old, kind or settings.kind
    ratio = np.exp(np.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = 1 - settings.eps_clip, 1 + settings.eps_clip_high
    free = -advantages * ratio
    moving = np.where(np.abs(gap) <= MAX_LOG_RATIO, free, 0.0)
    if kind == "importance_sampling":
        return Surrogate(free, moving, np.zeros(free.shape, bool))
    if kind == "cispo":
        slope = -advantages * np.minimum(ratio, high)
        return Surrogate(slope * new, slope, ratio > high)
    bounded = -advantages * np.clip(ratio, low, high)
    return Surrogate(np.maximum(free, bounded), np.where(bounded > free, 0.0, moving), bounded > free)


def measure(settings: LossSettings, sequences: Sequence[TrainingSequence], logprobs: SpanLogprobs) -> Measured:
    """The loss of a batch whose tokens have these log-probs under the policy: mean over tokens, then samples."""
    samples = sum(len(sequence.spans) for sequence in sequences)
    total, clipped = 0.0, 0
    for sequence, spans in zip(sequences, logprobs, strict=True):
        for span, own in zip(sequence.spans, spans, strict=True):
            found = surrogate(settings, own, span.old_logprobs, span.advantages)
            total += float(found.loss.mean()) / samples
            clipped += int(found.clipped.sum())
    return Measured(total, clipped)


def loss_config(settings: LossSettings) -> dict[str, float] | None:
    """The clip as the service wants it: bounds of the ratio."""
    if settings.kind == "importance_sampling":
        return None
    low = 0.0 if settings.kind == "cispo" else 1 - settings.eps_clip
    return {"clip_low_threshold": low, "clip_high_threshold": 1 + settings.eps_clip_high}

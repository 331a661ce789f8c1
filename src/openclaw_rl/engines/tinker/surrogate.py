"""Policy losses and their slopes, from log-probs that the service returns.

In NumPy, because the server's process does not load PyTorch. `losses.policy` computes the same with gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.engines.tinker.datum import Table
from openclaw_rl.types import MAX_LOG_RATIO, LossSettings, TrainingSequence


class Surrogate(NamedTuple):
    """The loss of each token; all arrays have the same shape."""

    loss: Table
    slope: Table
    """Derivative of the loss by the token's log-prob."""
    clipped: NDArray[np.bool_]
    """Whether the clip holds the token back."""


class Measured(NamedTuple):
    """A batch's loss, and the number of tokens that the clip held back."""

    loss: float
    clipped: int


def surrogate(settings: LossSettings, new: Any, old: Any, advantages: Any, kind: str = "") -> Surrogate:
    """The loss of tokens with these log-probs; `kind` replaces the settings' kind of loss, not their bounds."""
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
        for span, span_logprobs in zip(sequence.spans, spans, strict=True):
            losses = surrogate(settings, span_logprobs, span.old_logprobs, span.advantages)
            total += float(losses.loss.mean()) / samples
            clipped += int(losses.clipped.sum())
    return Measured(total, clipped)


def loss_config(settings: LossSettings) -> dict[str, float] | None:
    """The clip in the service's form: bounds of the ratio."""
    if settings.kind == "importance_sampling":
        return None
    low = 0.0 if settings.kind == "cispo" else 1 - settings.eps_clip
    return {"clip_low_threshold": low, "clip_high_threshold": 1 + settings.eps_clip_high}

"""What the service computes of a policy loss, computed again from the log-probs that it returns: for reports alone.

Without PyTorch, which the server's process does not load; `losses.policy` is the same with gradients.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from openclaw_rl.engines.measures import SpanLogprobs
from openclaw_rl.types import LossSettings, TrainingSequence

MAX_LOG_RATIO = 20.0


class Measured(NamedTuple):
    """A batch's loss, and how many of its tokens the clip held back."""

    loss: float
    clipped: int


def measure(settings: LossSettings, sequences: Sequence[TrainingSequence], logprobs: SpanLogprobs) -> Measured:
    """The loss of a batch whose tokens have these log-probs under the policy: mean over tokens, then samples."""
    samples = sum(len(sequence.spans) for sequence in sequences)
    total, clipped = 0.0, 0
    for sequence, spans in zip(sequences, logprobs, strict=True):
        for span, own in zip(sequence.spans, spans, strict=True):
            terms = [token(settings, *each) for each in zip(own, span.old_logprobs, span.advantages, strict=True)]
            total += sum(term.loss for term in terms) / (len(terms) * samples)
            clipped += sum(term.clipped for term in terms)
    return Measured(total, clipped)


def token(settings: LossSettings, logprob: float, old: float, advantage: float) -> Measured:
    ratio = math.exp(min(max(logprob - old, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    high = 1 + settings.eps_clip_high
    free = -advantage * ratio
    if settings.kind == "importance_sampling":
        return Measured(free, 0)
    if settings.kind == "cispo":
        return Measured(-advantage * min(ratio, high) * logprob, int(ratio > high))
    bounded = -advantage * min(max(ratio, 1 - settings.eps_clip), high)
    return Measured(max(free, bounded), int(bounded > free))


def loss_config(settings: LossSettings) -> dict[str, float] | None:
    """The clip as the service wants it: bounds of the ratio."""
    if settings.kind == "importance_sampling":
        return None
    low = 0.0 if settings.kind == "cispo" else 1 - settings.eps_clip
    return {"clip_low_threshold": low, "clip_high_threshold": 1 + settings.eps_clip_high}

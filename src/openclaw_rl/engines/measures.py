"""How far apart two policies are, from the log-probs that they give to the same tokens."""

import math

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.types import MAX_LOG_RATIO

#: For each sequence, for each of its spans, one log-prob a token.
SpanLogprobs = list[list[list[float]]]


def distance(one: SpanLogprobs, other: SpanLogprobs) -> float:
    """The divergence of `other` from `one`, a token: never negative, from tokens that one of them may have sampled."""
    pairs = [
        (a, b)
        for first, second in zip(one, other, strict=True)
        for span, same in zip(first, second, strict=True)
        for a, b in zip(span, same, strict=True)
    ]
    if not pairs:
        return 0.0
    ratios = [min(max(b - a, -MAX_LOG_RATIO), MAX_LOG_RATIO) for a, b in pairs]
    return sum(math.exp(ratio) - 1 - ratio for ratio in ratios) / len(ratios)


def check_move(moved: float, most: float) -> None:
    """Raise StepRefused if a step went too far, or nobody knows where."""
    if not moved <= most:
        raise StepRefused(f"the step would move the policy by {moved:.3g} a token, more than --max-kl {most:g}")

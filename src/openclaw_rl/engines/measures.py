"""How far apart two policies are, from the log-probs that they give to the same tokens."""

import math

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.types import MAX_LOG_RATIO

#: For each sequence, for each of its spans, one log-prob a token.
SpanLogprobs = list[list[list[float]]]


def distance(one: SpanLogprobs, other: SpanLogprobs) -> float:
    """How far two policies are apart, a token: never negative, the same either way.

    With r the log-ratio of a token, e^r - 1 - r estimates KL(one || other) from tokens that `one` sampled, and
    e^-r - 1 + r KL(other || one) from the other's. Of a small move both are r²/2. An imported token was sampled by
    neither, and then the first overstates without limit where an improbable token became likelier, the second where a
    likely one became less so. The smaller of the two, |r| - 1 + e^-|r|, never grows faster than |r|: a few tokens
    cannot make a move look large, while many that moved far still do.
    """
    pairs = [
        (a, b)
        for first, second in zip(one, other, strict=True)
        for span, same in zip(first, second, strict=True)
        for a, b in zip(span, same, strict=True)
    ]
    if not pairs:
        return 0.0
    ratios = [min(abs(b - a), MAX_LOG_RATIO) for a, b in pairs]
    return sum(ratio - 1 + math.exp(-ratio) for ratio in ratios) / len(ratios)


def check_move(moved: float, most: float) -> None:
    """Raise StepRefused if a step went too far, or nobody knows where."""
    if not moved <= most:
        raise StepRefused(f"the step would move the policy by {moved:.3g} a token, more than --max-kl {most:g}")

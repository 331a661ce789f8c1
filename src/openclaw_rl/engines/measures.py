"""Distance between two policies, from the log-probs that they give to the same tokens."""

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.engines.errors import StepRefused
from openclaw_rl.types import MAX_LOG_RATIO


def distance(one: SpanLogprobs, other: SpanLogprobs) -> float:
    """Distance between two policies per token. It is symmetric and never negative.

    Let r be the log-ratio of a token. Then e^r - 1 - r estimates KL(one || other) from tokens that `one` sampled, and
    e^-r - 1 + r estimates KL(other || one) from tokens that `other` sampled. Both are about r²/2 for a small move.
    Neither policy sampled an imported token. For such a token the first estimate grows without bound where an
    improbable token became likelier, and the second where a likely token became less likely. This function takes the
    smaller of the two, |r| - 1 + e^-|r|, which never grows faster than |r|: a few tokens cannot make a move look large,
    and many tokens that moved far still do.
    """
    first, second = flat(one), flat(other)
    if [len(span) for spans in one for span in spans] != [len(span) for spans in other for span in spans]:
        raise ValueError("the two policies were not asked about the same spans")
    if not len(first):
        return 0.0
    ratios = np.minimum(np.abs(second - first), MAX_LOG_RATIO)
    return float(np.mean(ratios - 1 + np.exp(-ratios)))


def flat(logprobs: SpanLogprobs) -> NDArray[np.float64]:
    return np.array([logprob for spans in logprobs for span in spans for logprob in span], np.float64)


def check_move(moved: float, most: float) -> None:
    """Raise StepRefused if a step moved the policy too far, or if the distance is NaN."""
    if not moved <= most:
        raise StepRefused(f"the step would move the policy by {moved:.3g} per token, more than --max-kl {most:g}")

"""Decides when a note is no longer needed: a test of whether the policy pleases as often without it as with it."""

import math

from openclaw_rl.types import NoteOutcomes

#: The test compares at most this many of the newest outcomes of each kind: the policy changes, and old ones say little.
RECENT_OUTCOMES = 16
#: The policy without the note may please less often by this share at most.
MARGIN = 0.2
#: The probability that a note is retired although the policy is worse without it by the margin.
LEVEL = 0.05
#: The quantile of the normal distribution at 1 - LEVEL.
_QUANTILE = 1.6449


def does_without(given: NoteOutcomes, withheld: NoteOutcomes) -> bool:
    """Whether the policy pleases without a note as often as with it.

    It is a one-sided test of non-inferiority at LEVEL: the lower end of Newcombe's interval for the difference of the
    two shares, made from Wilson's intervals, must be above -MARGIN.
    """
    if not given.total or not withheld.total:
        return False
    with_note, without_note = given.held / given.total, withheld.held / withheld.total
    lowest = wilson(without_note, withheld.total)[0]
    highest = wilson(with_note, given.total)[1]
    distance = math.hypot(without_note - lowest, highest - with_note)
    return without_note - with_note - distance > -MARGIN


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval for a share of `count` outcomes; each end is missed with a probability of LEVEL."""
    z2 = _QUANTILE**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _QUANTILE / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return middle - half, middle + half

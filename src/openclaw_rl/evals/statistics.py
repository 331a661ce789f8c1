"""What a few results allow to say: means with intervals, whether a difference is one, and sessions until adherence.

Pure Python; the same input and seed give the same numbers everywhere.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

CONFIDENCE = 0.95
#: Enough for two digits of an interval's ends.
RESAMPLES = 2_000
#: Sessions in a row whose first reply has to pass.
RUN = 3


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the interval that it lies in with the confidence that was asked for."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Difference:
    """How much more the second of two has, on the same cases."""

    mean: float
    low: float
    high: float
    p: float
    """How probable so large a difference, either way, would be if there were none."""
    n: int


@dataclass(frozen=True, slots=True)
class Until:
    """Sessions until adherence over several seeds."""

    mean: float
    """Those that never got there count as the cap, so that with any of them the true mean is larger."""
    low: float
    high: float
    cap: int
    reached: int
    censored: int

    def __str__(self) -> str:
        bound = "≥ " if self.censored else ""
        never = f"; {self.censored} of {self.reached + self.censored} not within {self.cap}" if self.censored else ""
        return f"{bound}{self.mean:.1f} [{self.low:.1f}, {self.high:.1f}]{never}"


def proportion(passes: Sequence[bool], confidence: float = CONFIDENCE) -> Interval:
    """The share that passed, with Wilson's interval. Raises ValueError without any."""
    n = _size(passes)
    share, z = sum(passes) / n, NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not put the share outside.
    return Interval(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)), n)


def mean(values: Sequence[float], seed: int = 0, confidence: float = CONFIDENCE) -> Interval:
    """The mean with a bootstrap interval. Raises ValueError without values, or where one is not finite."""
    n = _size(values)
    centre = fmean(values)
    low, high = _ends(_resampled(values, seed), confidence)
    return Interval(centre, min(low, centre), max(high, centre), n)


def compare_passes(before: Sequence[bool], after: Sequence[bool], seed: int = 0) -> Difference:
    """The difference of two shares on the same cases, with McNemar's exact test. Raises ValueError if not paired."""
    gaps = _gaps(before, after)
    better, worse = gaps.count(1.0), gaps.count(-1.0)
    interval = mean(gaps, seed)
    return Difference(interval.mean, interval.low, interval.high, _mcnemar(better, worse), len(gaps))


def compare_means(before: Sequence[float], after: Sequence[float], seed: int = 0) -> Difference:
    """The difference of two means on the same cases, with a paired bootstrap. Raises ValueError if not paired.

    The significance is how often resampled differences, moved to a mean of none, are as far from it as the real one.
    """
    gaps = _gaps(before, after)
    interval = mean(gaps, seed)
    moved = _resampled([gap - interval.mean for gap in gaps], seed + 1)
    # A little less than the difference itself, so that rounding does not decide.
    limit = abs(interval.mean) * (1 - 1e-9)
    extreme = sum(1 for value in moved if abs(value) >= limit)
    # The real one counts as one of them, so that a probability is never 0.
    return Difference(interval.mean, interval.low, interval.high, (extreme + 1) / (len(moved) + 1), len(gaps))


def sessions_until_adherence(passes: Sequence[bool], run: int = RUN) -> int | None:
    """How many sessions it took until the first reply had passed `run` times in a row; None if it never did.

    `passes` has one entry a session. The sessions of the row itself are counted: passing from the start takes `run`.
    """
    if run < 1:
        raise ValueError("A row has at least one session.")
    row = 0
    for number, passed in enumerate(passes, start=1):
        row = row + 1 if passed else 0
        if row == run:
            return number
    return None


def mean_until(results: Sequence[int | None], cap: int, seed: int = 0) -> Until:
    """The mean over seeds; one that is None or over the cap counts as the cap and is marked. ValueError without any."""
    reached = sum(1 for result in results if result is not None and result <= cap)
    interval = mean([cap if result is None else min(result, cap) for result in results], seed)
    return Until(interval.mean, interval.low, interval.high, cap, reached, len(results) - reached)


def _mcnemar(better: int, worse: int) -> float:
    """The probability of so uneven a split, either way, of the cases that changed, if both ways were as likely."""
    changed = better + worse
    tail = sum(math.comb(changed, count) for count in range(min(better, worse) + 1))
    # Integers until the end: half to the power of many is no float.
    return min(1.0, float(2 * tail / 2**changed))


def _gaps(before: Sequence[float], after: Sequence[float]) -> list[float]:
    if len(before) != len(after):
        raise ValueError(f"Results on the same cases are as many: not {len(before)} and {len(after)}.")
    return [float(new) - float(old) for old, new in zip(before, after, strict=True)]


def _resampled(values: Sequence[float], seed: int) -> list[float]:
    """The means of samples drawn with replacement, in order."""
    dice, n = random.Random(seed), len(values)
    return sorted(fmean(dice.choices(values, k=n)) for _ in range(RESAMPLES))


def _ends(ordered: Sequence[float], confidence: float) -> tuple[float, float]:
    """The middle part of ordered values."""
    cut = int(len(ordered) * (1 - confidence) / 2)
    return ordered[cut], ordered[-1 - cut]


def _size(values: Sequence[float]) -> int:
    if not values:
        raise ValueError("There are no results to take a mean of.")
    if not all(map(math.isfinite, values)):
        raise ValueError("A result is not a finite number.")
    return len(values)

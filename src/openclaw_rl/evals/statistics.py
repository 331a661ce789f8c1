"""What a few results allow to say: means with intervals, whether a difference is one, and sessions until adherence.

Pure Python; the same input and seed give the same numbers everywhere.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

CONFIDENCE = 0.95
#: Enough for two digits of an interval's ends.
RESAMPLES = 2_000
#: Sessions in a row whose first reply has to pass.
RUN = 3

#: A trial's answers: the question of each, and whether it passed.
Marks = Sequence[tuple[str, bool]]


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
    """The share that passed of independent cases, with Wilson's interval. Raises ValueError without any."""
    n = _size(passes)
    share = sum(passes) / n
    return Interval(share, *_wilson(share, n, confidence), n)


def proportion_of_trials(trials: Sequence[Marks], confidence: float = CONFIDENCE) -> Interval:
    """The share that passed where every trial was asked the same questions, some of them more than once.

    Answers to one question are alike, and so are those of one trial. So the interval is Wilson's of fewer answers: as
    many independent ones as would scatter like the share does when questions and trials are drawn anew, with
    replacement and apart from each other (Owen's pigeonhole bootstrap, whose variance needs no drawing). Where nothing
    scatters, as when all passed, every question counts as one answer.

    Assumes that the questions are a random sample of those that could be asked, and the trials of those that could be
    held. It is rather wide where trials are alike, and rough where a few trials differ much; one trial says nothing of
    others. Raises ValueError without answers.
    """
    passes = [passed for marks in trials for _, passed in marks]
    n = _size(passes)
    share = sum(passes) / n
    return Interval(share, *_wilson(share, _worth(trials, n, sum(passes)), confidence), n)


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


def _wilson(share: float, n: float, confidence: float) -> tuple[float, float]:
    """Wilson's interval of a share of `n` independent answers."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not put the share outside.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _worth(trials: Sequence[Marks], n: int, passes: int) -> float:
    """How many independent answers say as much as these `n`."""
    cells, rows, columns = Counter[tuple[int, str]](), Counter[int](), Counter[str]()
    for trial, marks in enumerate(trials):
        for question, passed in marks:
            # What it is above the share, times n: whole numbers, so that nothing scatters by rounding.
            excess = n * passed - passes
            cells[trial, question] += excess
            rows[trial] += excess
            columns[question] += excess
    # The variance of a sum over cells, each weighted by how often its row and its column are drawn.
    scatter = _squares(cells) + (1 - 1 / len(columns)) * _squares(rows) + (1 - 1 / len(rows)) * _squares(columns)
    return min(n, passes * (n - passes) * n**2 / scatter) if scatter else len(columns)


def _squares(sums: Counter[Any]) -> int:
    return sum(value**2 for value in sums.values())


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

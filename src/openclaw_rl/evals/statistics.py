"""What a few results allow to say: means with intervals, whether a difference is one, and sessions until adherence.

Pure Python; the same input gives the same numbers everywhere.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import Any

CONFIDENCE = 0.95
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
class SessionsUntil:
    """Sessions until adherence over several seeds."""

    mean: float
    """Those that never got there count as the cap, so that with any of them the true mean is larger."""
    interval: tuple[float, float] | None
    """Of the mean; None where it is not known: of one seed, of seeds that are all alike, or if any never got there."""
    cap: int
    reached: int
    censored: int

    def __str__(self) -> str:
        seeds = self.reached + self.censored
        if seeds == 1:
            return f"not within {self.cap}" if self.censored else f"{self.mean:.0f}"
        if not self.reached:
            return f"none of {seeds} within {self.cap}"
        if self.censored:
            return f"≥ {self.mean:.1f}, {self.censored} of {seeds} not within {self.cap}"
        between = f" ({self.interval[0]:.0f}–{self.interval[1]:.0f})" if self.interval else ""
        return f"{self.mean:.1f}{between}"


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


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student's interval of the mean. Raises ValueError without values, or where one is not finite.

    None where the values do not show how they scatter: a single one, or all the same. Assumes that they are drawn from
    something like a normal distribution; of a few that are not, it is rough.
    """
    n = _size(values)
    if len(set(values)) == 1:
        return None
    centre = fmean(values)
    half = _student(n - 1, confidence) * stdev(values) / math.sqrt(n)
    return centre - half, centre + half


def compare_passes(before: Sequence[bool], after: Sequence[bool], confidence: float = CONFIDENCE) -> Difference:
    """The difference of two shares on the same cases. Raises ValueError if they are not paired, or there are none.

    With McNemar's exact test and Newcombe's interval for paired shares (1998, his method 10), which has a width also
    where no case changed.
    """
    if len(before) != len(after):
        raise ValueError(f"Results on the same cases are as many: not {len(before)} and {len(after)}.")
    n = _size(before)
    old, new = sum(before) / n, sum(after) / n
    old_low, old_high = _wilson(old, n, confidence)
    new_low, new_high = _wilson(new, n, confidence)
    pairs = Counter(zip(map(bool, before), map(bool, after), strict=True))
    alike = _correlation(pairs)
    low = new - old - _apart(new - new_low, old_high - old, alike)
    high = new - old + _apart(new_high - new, old - old_low, alike)
    return Difference(new - old, low, high, _mcnemar(pairs[False, True], pairs[True, False]), n)


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


def mean_until(results: Sequence[int | None], cap: int, run: int = RUN) -> SessionsUntil:
    """The mean over seeds; one that is None or over the cap counts as the cap and is marked. ValueError without any."""
    sessions = [cap if result is None else min(result, cap) for result in results]
    reached = sum(1 for result in results if result is not None and result <= cap)
    # Numbers that are only known to be too small have no interval.
    found = mean_interval(sessions) if reached == len(sessions) else None
    # A row takes its own sessions at least.
    interval = (max(found[0], run), found[1]) if found else None
    return SessionsUntil(fmean(sessions), interval, cap, reached, len(sessions) - reached)


def _mcnemar(better: int, worse: int) -> float:
    """The probability of so uneven a split, either way, of the cases that changed, if both ways were as likely."""
    changed = better + worse
    tail = sum(math.comb(changed, count) for count in range(min(better, worse) + 1))
    # Integers until the end: half to the power of many is no float.
    return min(1.0, float(2 * tail / 2**changed))


def _correlation(pairs: Counter[tuple[bool, bool]]) -> float:
    """How alike two results of a case are, with Newcombe's correction for continuity; 0 where one is constant."""
    both, neither = pairs[True, True], pairs[False, False]
    worse, better = pairs[True, False], pairs[False, True]
    spread = (both + worse) * (better + neither) * (both + better) * (worse + neither)
    if not spread:
        return 0.0
    excess = both * neither - worse * better
    return (max(excess - pairs.total() / 2, 0.0) if excess > 0 else excess) / math.sqrt(spread)


def _apart(one: float, other: float, alike: float) -> float:
    """How far the difference of two shares reaches, from how far each does."""
    return math.sqrt(one**2 - 2 * alike * one * other + other**2)


@cache
def _student(freedom: int, confidence: float) -> float:
    """Student's t that is not exceeded, either way, with this confidence."""
    low, high = 0.0, math.pi / 2
    # The probability between -t and t grows with the angle atan(t / √freedom). Halving ends at a float's precision.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """The probability that Student's t lies within an angle, as a finite sum (Abramowitz and Stegun, 26.7.3 and 4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


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


def _size(values: Sequence[float]) -> int:
    if not values:
        raise ValueError("There are no results to take a mean of.")
    if not all(map(math.isfinite, values)):
        raise ValueError("A result is not a finite number.")
    return len(values)

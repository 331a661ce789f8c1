"""Statistics of few results: means with intervals, tests of differences, and sessions until adherence.

The same input gives the same numbers everywhere.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np

CONFIDENCE = 0.95
#: How many sessions in a row must have a first reply that passes.
RUN = 3

#: The answers of a trial: the question of each, and whether the answer passed.
Marks = Sequence[tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Difference:
    """The second result minus the first, on the same cases."""

    mean: float
    low: float
    high: float
    p: float
    """The two-sided p-value."""
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ({self.low:+.2f} – {self.high:+.2f})"


def in_two_lines(result: Interval | Difference | str) -> str:
    """The interval below the mean, for tables that fit a terminal of 80 columns."""
    return str(result).replace(" (", "\n(", 1)


@dataclass(frozen=True, slots=True)
class SessionsUntil:
    """Sessions until adherence over several seeds."""

    mean: float
    """Seeds that never got there count as the cap, so with any of them the true mean is larger."""
    interval: tuple[float, float] | None
    """Of the mean; None if it is unknown: for a single seed, for equal seeds, or if any seed never got there."""
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


def proportion(passes: Sequence[bool]) -> Interval:
    """The share of independent cases that passed, with Wilson's interval. Raises ValueError if there are none."""
    n = _size(passes)
    share = sum(passes) / n
    return Interval(share, *_wilson(share, n), n)


def proportion_of_trials(trials: Sequence[Marks]) -> Interval:
    """The share that passed, where all trials ask the same questions and may repeat some.

    Answers to one question are correlated, and so are the answers of one trial. The interval is therefore Wilson's
    interval for a smaller, effective number of independent answers. That number gives the variance that the share has
    when questions and trials are resampled with replacement, independently of each other (Owen's pigeonhole bootstrap,
    whose variance has a closed form). If nothing varies, for example if all passed, every question counts as one
    answer.

    Assumes that questions and trials are random samples. The interval is too wide if trials are alike, and rough if a
    few trials differ a lot; one trial says nothing about others. Raises ValueError if there are no answers.
    """
    passes = [passed for marks in trials for _, passed in marks]
    n = _size(passes)
    share = sum(passes) / n
    return Interval(share, *_wilson(share, _effective_size(trials, n, sum(passes))), n)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of the mean. Raises ValueError if there are no values or one is not finite.

    None if the values show no variance: a single value, or all the same. Assumes that they are roughly normally
    distributed.
    """
    n = _size(values)
    if len(set(values)) == 1:
        return None
    centre = fmean(values)
    half = _student(n - 1) * stdev(values) / math.sqrt(n)
    return centre - half, centre + half


def compare_passes(before: Sequence[bool], after: Sequence[bool]) -> Difference:
    """The difference of two shares on the same cases. Raises ValueError if they are not paired or there are none.

    Uses McNemar's exact test and Newcombe's interval for paired shares (1998, method 10), which has a width even if no
    case changed.
    """
    if len(before) != len(after):
        raise ValueError(f"Paired results must be equal in number, not {len(before)} and {len(after)}.")
    n = _size(before)
    old, new = sum(before) / n, sum(after) / n
    old_low, old_high = _wilson(old, n)
    new_low, new_high = _wilson(new, n)
    pairs = Counter(zip(map(bool, before), map(bool, after), strict=True))
    correlation = _correlation(pairs)
    low = new - old - _reach(new - new_low, old_high - old, correlation)
    high = new - old + _reach(new_high - new, old - old_low, correlation)
    return Difference(new - old, low, high, _mcnemar(pairs[False, True], pairs[True, False]), n)


def probability_of_so_few(pairs: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> float:
    """How probable so few passes in the second results are, if both pass each case equally often.

    It is exact: given how many results of a case passed in all, every division of them between the two is equally
    probable. With one result of each it is McNemar's test.
    """
    chances, passed = np.ones(1), 0
    for before, got in pairs:
        both = sum(before) + sum(got)
        # Where all results pass, or none, there is one division.
        if before and 0 < both < len(before) + len(got):
            chances = np.convolve(chances, _divisions(len(before), len(got), both))
            passed += sum(got)
    return float(chances[: passed + 1].sum())


def sessions_until_adherence(passes: Sequence[bool], run: int = RUN) -> int | None:
    """How many sessions it took until the first reply passed `run` times in a row; None if it never did.

    `passes` has one entry per session. The row itself is counted: passing from the start takes `run` sessions.
    """
    if run < 1:
        raise ValueError("A row needs at least one session.")
    row = 0
    for number, passed in enumerate(passes, start=1):
        row = row + 1 if passed else 0
        if row == run:
            return number
    return None


def mean_until(results: Sequence[int | None], cap: int, run: int = RUN) -> SessionsUntil:
    """The mean over seeds. None or more than the cap counts as the cap and as censored. Raises ValueError if empty."""
    sessions = [cap if result is None else min(result, cap) for result in results]
    reached = sum(1 for result in results if result is not None and result <= cap)
    # Capped numbers are too small, so they give no interval.
    bounds = mean_interval(sessions) if reached == len(sessions) else None
    # No seed can take fewer sessions than the row has.
    interval = (max(bounds[0], run), bounds[1]) if bounds else None
    return SessionsUntil(fmean(sessions), interval, cap, reached, len(sessions) - reached)


@cache
def _divisions(others: int, own: int, passed: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The chances that 0, 1, … of `own` answers are among those that passed."""
    ways = [math.comb(own, n) * math.comb(others, passed - n) if n <= passed else 0 for n in range(own + 1)]
    return np.array(ways) / math.comb(own + others, passed)


def _mcnemar(better: int, worse: int) -> float:
    """The two-sided p-value of the split of the changed cases, if better and worse are equally likely."""
    changed = better + worse
    tail = sum(math.comb(changed, count) for count in range(min(better, worse) + 1))
    # Integers until the end, because a high power of 1/2 underflows.
    return min(1.0, float(2 * tail / 2**changed))


def _correlation(pairs: Counter[tuple[bool, bool]]) -> float:
    """The correlation of paired results, with Newcombe's continuity correction; 0 if one of them is constant."""
    both, neither = pairs[True, True], pairs[False, False]
    worse, better = pairs[True, False], pairs[False, True]
    spread = (both + worse) * (better + neither) * (both + better) * (worse + neither)
    if not spread:
        return 0.0
    excess = both * neither - worse * better
    return (max(excess - pairs.total() / 2, 0.0) if excess > 0 else excess) / math.sqrt(spread)


def _reach(one: float, other: float, correlation: float) -> float:
    """The half-width of the interval of a difference, from the half-widths of both shares."""
    return math.sqrt(one**2 - 2 * correlation * one * other + other**2)


@cache
def _student(freedom: int) -> float:
    """The two-sided critical value of Student's t."""
    low, high = 0.0, math.pi / 2
    # The probability between -t and t grows with the angle atan(t / √freedom). It ends at the precision of a float.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
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


def _wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's interval of a share of `n` independent answers."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    # Rounding must not move the share outside.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))


def _effective_size(trials: Sequence[Marks], n: int, passes: int) -> float:
    """The effective number of independent answers."""
    cells, rows, columns = Counter[tuple[int, str]](), Counter[int](), Counter[str]()
    for trial, marks in enumerate(trials):
        for question, passed in marks:
            # The deviation from the share, times n: in whole numbers, so that rounding adds no variance.
            excess = n * passed - passes
            cells[trial, question] += excess
            rows[trial] += excess
            columns[question] += excess
    # The variance of a sum over cells, each weighted by how often its row and its column are resampled.
    variance = _squares(cells) + (1 - 1 / len(columns)) * _squares(rows) + (1 - 1 / len(rows)) * _squares(columns)
    return min(n, passes * (n - passes) * n**2 / variance) if variance else len(columns)


def _squares(sums: Counter[Any]) -> int:
    return sum(value**2 for value in sums.values())


def _size(values: Sequence[float]) -> int:
    if not values:
        raise ValueError("There are no results.")
    if not all(map(math.isfinite, values)):
        raise ValueError("A result is not a finite number.")
    return len(values)

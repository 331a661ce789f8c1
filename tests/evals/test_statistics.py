"""Means, intervals, differences, and sessions until adherence."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.evals.statistics import (
    compare_means,
    compare_passes,
    mean,
    mean_until,
    proportion,
    sessions_until_adherence,
)

outcomes = st.lists(st.booleans(), min_size=1, max_size=60)
numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


def test_wilson_as_it_is_in_tables() -> None:
    interval = proportion([True] * 8 + [False] * 2)
    assert interval.mean == 0.8
    assert interval.low == pytest.approx(0.4902, abs=1e-4)
    assert interval.high == pytest.approx(0.9433, abs=1e-4)


def test_a_perfect_score_is_no_certainty() -> None:
    interval = proportion([True] * 10)
    assert interval.high == 1.0
    assert interval.low == pytest.approx(0.7225, abs=1e-4)


@settings(deadline=None)
@given(outcomes)
def test_a_share_lies_in_its_interval(passes: list[bool]) -> None:
    interval = proportion(passes)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.n == len(passes)


@settings(deadline=None)
@given(numbers, st.integers(0, 3))
def test_a_mean_lies_in_its_interval(values: list[float], seed: int) -> None:
    interval = mean(values, seed)
    assert interval.low <= interval.mean <= interval.high
    assert min(values) - 1e-6 <= interval.low
    assert interval.high <= max(values) + 1e-6
    assert interval == mean(values, seed)


def test_the_bootstrap_agrees_with_the_normal_interval() -> None:
    values = [float(place % 10) for place in range(200)]
    half = 1.96 * math.sqrt(8.25 / 200)
    interval = mean(values)
    assert interval.low == pytest.approx(4.5 - half, abs=0.08)
    assert interval.high == pytest.approx(4.5 + half, abs=0.08)


def test_mcnemar_looks_at_the_cases_that_changed() -> None:
    before = [False] * 8 + [True] * 2 + [True] * 50
    after = [True] * 8 + [False] * 2 + [True] * 50
    found = compare_passes(before, after)
    # Of ten that changed, at most two the other way: 2 · (1 + 10 + 45) / 1024.
    assert found.p == pytest.approx(112 / 1024)
    assert found.mean == pytest.approx(0.1)
    assert found.low <= 0.1 <= found.high


def test_no_change_is_no_difference() -> None:
    assert compare_passes([True, False], [True, False]).p == 1.0
    assert compare_means([1.0, 2.0], [1.0, 2.0]).p == 1.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_a_difference_has_two_sides(pairs: list[tuple[bool, bool]]) -> None:
    before, after = [one for one, _ in pairs], [other for _, other in pairs]
    there, back = compare_passes(before, after), compare_passes(after, before)
    assert there.p == back.p
    assert 0 < there.p <= 1
    assert there.mean == pytest.approx(-back.mean)


def test_many_cases_do_not_overflow() -> None:
    assert compare_passes([False] * 5000, [True] * 5000).p < 1e-300


def test_paired_means_see_what_is_the_same_in_every_case() -> None:
    before = [float(place) for place in range(20)]
    clear = compare_means(before, [value + 1 + 0.1 * (place % 3) for place, value in enumerate(before)])
    assert clear.low > 0.9
    assert clear.p < 0.01
    noise = compare_means(before, [value + (3 if place % 2 else -3) for place, value in enumerate(before)])
    assert noise.low < 0 < noise.high
    assert noise.p > 0.5


def test_unpaired_results_and_no_results_are_refused() -> None:
    with pytest.raises(ValueError, match="not 1 and 2"):
        compare_means([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no results"):
        proportion([])
    with pytest.raises(ValueError, match="finite"):
        mean([1.0, math.nan])


@pytest.mark.parametrize(
    ("passes", "sessions"),
    [("111", 3), ("0111", 4), ("110111", 6), ("11011", None), ("", None), ("1" * 9, 3)],
)
def test_sessions_until_three_in_a_row(passes: str, sessions: int | None) -> None:
    assert sessions_until_adherence([letter == "1" for letter in passes]) == sessions


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_the_row_ends_where_it_is_said_to(passes: list[bool], run: int) -> None:
    sessions = sessions_until_adherence(passes, run)
    if sessions is None:
        assert all(not all(passes[place : place + run]) for place in range(len(passes) - run + 1))
    else:
        assert all(passes[sessions - run : sessions])
        assert sessions_until_adherence(passes[: sessions - 1], run) is None


def test_those_that_never_got_there_are_counted_at_the_cap_and_named() -> None:
    until = mean_until([4, 6, None, 40], cap=20)
    assert until.mean == (4 + 6 + 20 + 20) / 4
    assert (until.reached, until.censored) == (2, 2)
    assert str(until).startswith("≥ 12.5")
    assert "2 of 4 not within 20" in str(until)
    assert str(mean_until([4, 6], cap=20)).startswith("5.0 [")

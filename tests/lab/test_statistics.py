"""Means, intervals, differences, and sessions until adherence."""

import math
import random
from collections import Counter
from statistics import pvariance, variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.lab.statistics import (
    RUN,
    Marks,
    compare_passes,
    mean_interval,
    mean_until,
    proportion,
    proportion_of_trials,
    sessions_until_adherence,
)

outcomes = st.lists(st.booleans(), min_size=1, max_size=60)
numbers = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20, unique=True)


def test_wilson_as_it_is_in_tables() -> None:
    interval = proportion([True] * 8 + [False] * 2)
    assert interval.mean == 0.8
    assert interval.low == pytest.approx(0.4902, abs=1e-4)
    assert interval.high == pytest.approx(0.9433, abs=1e-4)


def test_a_perfect_score_is_no_certainty() -> None:
    interval = proportion([True] * 10)
    assert interval.high == 1.0
    assert interval.low == pytest.approx(0.7225, abs=1e-4)


@given(outcomes)
def test_a_share_lies_in_its_interval(passes: list[bool]) -> None:
    interval = proportion(passes)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.n == len(passes)


def held(dice: random.Random, questions: int = 23, trials: int = 3, answers: int = 40) -> list[Marks]:
    """Trials as the demo holds them: some questions are nearly always answered well and some nearly never."""
    chances = {f"Question {number}?": dice.betavariate(0.5, 0.5) for number in range(questions)}
    orders = [dice.sample(list(chances), k=questions) for _ in range(trials)]
    asked = [[order[place % questions] for place in range(answers)] for order in orders]
    return [[(question, dice.random() < chances[question]) for question in trial] for trial in asked]


def test_intervals_hold_the_truth_as_often_as_they_say_where_questions_are_asked_again_and_again() -> None:
    dice, truth, simulated = random.Random(0), 0.5, 400
    found = [proportion_of_trials(held(dice)) for _ in range(simulated)]
    covered = sum(interval.low <= truth <= interval.high for interval in found)
    assert covered >= 0.88 * simulated
    # Not by being useless: 23 independent answers would allow 0.38.
    assert sum(interval.high - interval.low for interval in found) < 0.36 * simulated


def test_one_trial_that_asks_each_question_once_has_wilson_s_interval() -> None:
    passes = [number % 3 > 0 for number in range(30)]
    found, plain = proportion_of_trials([list(zip(map(str, range(30)), passes, strict=True))]), proportion(passes)
    assert found == plain


def test_asking_again_and_hearing_the_same_is_to_know_nothing_more() -> None:
    marks = [(str(number), number % 2 > 0) for number in range(20)]
    once, often = proportion_of_trials([marks]), proportion_of_trials([marks * 5])
    assert often.n == 5 * once.n
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_policies_that_differ_say_little_of_the_next_one() -> None:
    questions = [str(number) for number in range(40)]
    trials = [[(question, passed) for question in questions] for passed in (True, False, True)]
    found = proportion_of_trials(trials)
    few = proportion([True, False, True])
    assert (found.low, found.high) == pytest.approx((few.low, few.high), abs=0.03)


@pytest.mark.parametrize("passed", [True, False])
def test_where_all_answers_are_alike_each_question_counts_once(passed: bool) -> None:
    found = proportion_of_trials([[("a", passed), ("b", passed)] * 20] * 3)
    few = proportion([passed] * 2)
    assert (found.mean, found.low, found.high, found.n) == (few.mean, few.low, few.high, 120)


def test_trials_and_questions_drawn_anew_scatter_as_the_interval_says() -> None:
    dice = random.Random(1)
    trials = held(dice)
    questions = sorted({question for marks in trials for question, _ in marks})
    shares = []
    for _ in range(3000):
        often = Counter(dice.choices(questions, k=len(questions)))
        drawn = [(often[q], passed) for marks in dice.choices(trials, k=len(trials)) for q, passed in marks]
        shares.append(sum(times * passed for times, passed in drawn) / sum(times for times, _ in drawn))
    found = proportion_of_trials(trials)
    few = found.mean * (1 - found.mean) / pvariance(shares)
    expected = proportion([number < round(few * found.mean) for number in range(round(few))])
    assert found.high - found.low == pytest.approx(expected.high - expected.low, rel=0.06)


marked = st.lists(st.tuples(st.sampled_from("abcdefg"), st.booleans()), max_size=9)


@given(st.lists(marked, min_size=1, max_size=4).filter(any))
def test_a_share_of_any_trials_lies_in_its_interval(trials: list[Marks]) -> None:
    """Also where a trial was cut short, or has questions of its own."""
    interval = proportion_of_trials(trials)
    assert 0 <= interval.low <= interval.mean <= interval.high <= 1
    assert interval.n == sum(map(len, trials))


@given(numbers)
def test_a_mean_lies_in_the_middle_of_its_interval(values: list[float]) -> None:
    interval = mean_interval(values)
    assert interval is not None
    assert sum(interval) / 2 == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert interval[0] <= interval[1]


#: As it is in tables: how many standard errors 95 % are, for so many values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262, 11: 2.228, 20: 2.093, 31: 2.042, 121: 1.980}


@pytest.mark.parametrize(("size", "errors"), STUDENT.items())
def test_student_as_it_is_in_tables(size: int, errors: float) -> None:
    values = [float(place % 7) for place in range(size)]
    interval = mean_interval(values)
    assert interval is not None
    assert (interval[1] - interval[0]) / 2 == pytest.approx(errors * math.sqrt(variance(values) / size), rel=2e-4)


@pytest.mark.parametrize("size", [2, 3, 5, 20])
def test_intervals_of_a_few_numbers_hold_the_mean_as_often_as_they_say(size: int) -> None:
    dice, simulated = random.Random(size), 2000
    found = [mean_interval([dice.gauss(20.0, 5.0) for _ in range(size)]) for _ in range(simulated)]
    covered = sum(interval is not None and interval[0] <= 20.0 <= interval[1] for interval in found)
    # Two standard errors of the simulation are 0.01.
    assert covered / simulated == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("values", [[12.0], [12.0] * 3])
def test_numbers_that_do_not_scatter_have_no_interval(values: list[float]) -> None:
    assert mean_interval(values) is None


def test_mcnemar_looks_at_the_cases_that_changed() -> None:
    before = [False] * 8 + [True] * 2 + [True] * 50
    after = [True] * 8 + [False] * 2 + [True] * 50
    found = compare_passes(before, after)
    # Of ten that changed, at most two the other way: 2 · (1 + 10 + 45) / 1024.
    assert found.p == pytest.approx(112 / 1024)
    assert found.mean == pytest.approx(0.1)
    assert found.low <= 0.1 <= found.high


def test_no_change_is_no_difference_and_no_certainty() -> None:
    for case in ([True], [False], [True, False]):
        found = compare_passes(case * 20, case * 20)
        assert (found.mean, found.p) == (0.0, 1.0)
        assert found.low == pytest.approx(-found.high)
        assert found.high > 0.04


@pytest.mark.parametrize(
    ("both", "better", "worse", "neither", "low", "high"),
    [(36, 12, 2, 0, 0.0569, 0.3404), (20, 12, 2, 16, 0.0562, 0.3292), (36, 14, 0, 0, 0.1528, 0.4167)],
)
def test_the_interval_of_a_difference_is_newcombes(
    both: int, better: int, worse: int, neither: int, low: float, high: float
) -> None:
    before = [True] * both + [False] * better + [True] * worse + [False] * neither
    after = [True] * (both + better) + [False] * (worse + neither)
    found = compare_passes(before, after)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("hard", "change"), [(0.03, 0.02), (0.1, 0.05), (0.5, 0.1), (0.8, 0.3)])
def test_intervals_of_differences_hold_the_truth_as_often_as_they_say(hard: float, change: float) -> None:
    """Cases that are failed with a chance, and whose result is another one later with a smaller one."""
    dice, simulated = random.Random(0), 1000
    truth = change * (2 * hard - 1)
    covered = 0
    for _ in range(simulated):
        before = [dice.random() >= hard for _ in range(40)]
        after = [passed != (dice.random() < change) for passed in before]
        found = compare_passes(before, after)
        covered += found.low <= truth <= found.high
    assert covered >= 0.94 * simulated


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_a_difference_has_two_sides(pairs: list[tuple[bool, bool]]) -> None:
    before, after = [one for one, _ in pairs], [other for _, other in pairs]
    there, back = compare_passes(before, after), compare_passes(after, before)
    assert there.p == back.p
    assert 0 < there.p <= 1
    assert there.mean == pytest.approx(-back.mean)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    assert -1 - 1e-9 <= there.low <= there.mean <= there.high <= 1 + 1e-9
    assert there.low < there.high


def test_many_cases_do_not_overflow() -> None:
    assert compare_passes([False] * 5000, [True] * 5000).p < 1e-300


def test_unpaired_results_and_no_results_are_refused() -> None:
    with pytest.raises(ValueError, match="not 1 and 2"):
        compare_passes([True], [True, False])
    for nothing in (
        lambda: proportion([]),
        lambda: proportion_of_trials([]),
        lambda: proportion_of_trials([[]]),
        lambda: compare_passes([], []),
        lambda: mean_until([], 9),
    ):
        with pytest.raises(ValueError, match="no results"):
            nothing()
    with pytest.raises(ValueError, match="finite"):
        mean_interval([1.0, math.nan])


@pytest.mark.parametrize(
    ("passes", "sessions"),
    [("111", 3), ("0111", 4), ("110111", 6), ("11011", None), ("", None), ("1" * 9, 3)],
)
def test_sessions_until_three_in_a_row(passes: str, sessions: int | None) -> None:
    assert sessions_until_adherence([letter == "1" for letter in passes]) == sessions


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
    assert until.interval is None, "the true mean may be anything above"
    assert str(until) == "≥ 12.5, 2 of 4 not within 20"
    assert str(mean_until([None, 25], cap=20)) == "none of 2 within 20"


def test_one_trial_is_told_in_few_words_and_without_an_interval() -> None:
    assert str(mean_until([6], cap=20)) == "6"
    assert str(mean_until([None], cap=6)) == "not within 6"
    assert str(mean_until([6, 6, 6], cap=20)) == "6.0"


def test_no_row_takes_fewer_sessions_than_it_has() -> None:
    until = mean_until([4, 6, 40], cap=60)
    assert until.interval is not None
    assert until.interval[0] == RUN
    assert str(until) == "16.7 (3–67)"

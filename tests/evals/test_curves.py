"""The learning curve shows what was measured."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.evals.page import curve, curve_charts, save_curve
from openclaw_rl.evals.trial import Exam, TrialOutcome
from openclaw_rl.lab.statistics import proportion
from support.properties import examples
from support.trials import a_trial, an_answer, an_exam, learning


def seconds(exam: Exam) -> float:
    return exam.seconds


def test_one_seed_has_its_own_values_with_the_interval_of_its_answers() -> None:
    marks = [[True, False, False, False], [True, True, False], [True, True, True, True]]
    found = curve([a_trial(*(an_exam(m, 10.0 * n) for n, m in enumerate(marks)))], seconds)
    assert found is not None
    expected = [proportion(m) for m in marks]
    assert found.x == [0.0, 10.0, 20.0]
    assert found.adherence == pytest.approx([e.mean for e in expected])
    assert found.low == pytest.approx([e.low for e in expected])
    assert found.high == pytest.approx([e.high for e in expected])


def test_several_seeds_are_their_mean_from_the_worst_to_the_best() -> None:
    slow = a_trial(an_exam([False, False]), an_exam([True, True], 20.0), seed=0)
    fast = a_trial(an_exam([False, False]), an_exam([True, True], 10.0), seed=1)
    found = curve([slow, fast], seconds)
    assert found is not None
    assert (found.x, found.seeds) == ([0.0, 10.0, 20.0], 2)
    assert found.adherence == [0.0, 0.75, 1.0]
    assert found.low == [0.0, 0.5, 1.0]
    assert found.high == [0.0, 1.0, 1.0]


def test_the_guard_has_a_line_of_its_own() -> None:
    answers = (an_answer(0, False), an_answer(1, True, keeps_rules=True, faults=("it is garbled",)))
    found = curve([a_trial(Exam(0, 0.0, 0, answers))], seconds)
    assert found is not None
    assert (found.adherence, found.quality) == ([0.0], [0.5])


def test_of_two_examinations_at_one_moment_the_later_policy_counts() -> None:
    found = curve([a_trial(an_exam([True], 5.0, 3, 8), an_exam([False], 5.0, 3, 4))], seconds)
    assert found is not None
    assert (found.x, found.adherence) == ([5.0], [1.0])


def test_without_examinations_there_is_no_line() -> None:
    assert curve([a_trial(), a_trial(Exam(0, 0.0, 0, ()), seed=1)], seconds) is None


marks = st.lists(st.booleans(), min_size=1, max_size=5)
moments = st.integers(0, 10_000_000).map(lambda milliseconds: milliseconds / 1000)
exams = st.lists(st.tuples(marks, moments), min_size=1, max_size=5)


@examples(60)
@given(st.lists(exams, min_size=1, max_size=4))
def test_a_mean_lies_in_its_band_whatever_was_measured(seeds: list[list[tuple[list[bool], float]]]) -> None:
    trials = [a_trial(*(an_exam(m, at, version=n) for n, (m, at) in enumerate(s)), seed=k) for k, s in enumerate(seeds)]
    found = curve(trials, seconds)
    assert found is not None
    assert found.x == sorted({at for s in seeds for _, at in s})
    for low, mean, high in zip(found.low, found.adherence, found.high, strict=True):
        assert 0 <= low <= mean + 1e-9
        assert mean <= high + 1e-9
        assert high <= 1


def texts(outcomes: list[TrialOutcome], tmp_path: Path) -> list[str]:
    save_curve(outcomes, tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    return [text for element in root.iter() if (text := element.text) and element.tag.endswith("text")]


def test_every_method_and_persona_is_named(tmp_path: Path) -> None:
    trials = [learning(m, p, s) for m in ("combine", "rl") for p in ("brief", "student") for s in (0, 1)]
    shown = texts(trials, tmp_path)
    assert {"combine", "rl", "worst to best of 2 seeds", "pass the quality guard", "minutes", "sessions"} <= set(shown)
    assert {"brief: over minutes", "brief: over sessions", "student: over minutes"} <= set(shown)
    assert {"0 %", "100 %"} <= set(shown)


def test_one_persona_is_not_named_and_one_seed_has_intervals(tmp_path: Path) -> None:
    shown = texts([learning()], tmp_path)
    assert "over minutes" in shown
    assert "95 % interval" in shown
    assert "nothing measured yet" not in shown


def test_nothing_is_said_to_be_nothing(tmp_path: Path) -> None:
    assert "nothing measured yet" in texts([], tmp_path)
    assert "nothing measured yet" in texts([a_trial()], tmp_path)


def test_charts_in_words_have_the_numbers() -> None:
    over_minutes, over_sessions = curve_charts([learning(), learning("rl")])
    for chart in (over_minutes, over_sessions):
        assert "combine, from 25 % to 75 %" in chart.svg
        assert 'polyline class="s0"' in chart.svg
        assert 'polyline class="s1"' in chart.svg, "both lines are drawn"
        assert chart.svg.count("polygon") == 2, "with their intervals"


def test_only_examinations_have_dots() -> None:
    """The mean of several seeds is mostly interpolated."""
    assert "<circle" in curve_charts([learning()])[0].svg
    assert "<circle" not in curve_charts([learning(seed=0), learning(seed=1)])[0].svg

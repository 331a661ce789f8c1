"""What trials came to: the numbers are those of the statistics, and nothing is said that is not known."""

from collections.abc import Sequence

import pytest

from openclaw_rl.evals.summary import grouped, summarise
from openclaw_rl.evals.trial import Exam
from openclaw_rl.lab.statistics import Interval, mean_until, proportion_of_trials
from support.trials import a_trial, an_answer, an_exam


def share(*trials: Sequence[bool]) -> Interval:
    """Of trials that ask the same questions in the same order."""
    return proportion_of_trials([[(f"Question {n}?", passed) for n, passed in enumerate(marks)] for marks in trials])


def test_shares_are_of_all_seeds_together() -> None:
    one = a_trial(an_exam([True, False]), an_exam([True, True], 60.0), seed=1)
    other = a_trial(an_exam([False, False]), an_exam([True, False], 180.0), seed=0)
    (found,) = summarise([one, other])
    assert found.seeds == (0, 1)
    assert found.before == share([False, False], [True, False])
    assert found.after == share([True, False], [True, True])
    assert found.minutes == pytest.approx(2.0)


def test_quality_is_of_the_guard_alone_and_adherence_needs_both() -> None:
    answers = (an_answer(0, False), an_answer(1, True, keeps_rules=True, faults=("it is garbled",)), an_answer(2))
    (found,) = summarise([a_trial(Exam(0, 0.0, 0, answers), Exam(4, 9.0, 3, answers))])
    assert found.after == share([False, False, True])
    assert found.quality_after == share([True, False, True])


def test_examinations_on_the_way_do_not_count_and_order_is_that_of_time() -> None:
    first, middle, last = an_exam([False] * 4), an_exam([True] * 4, 30.0, 2, 4), an_exam([True, False] * 2, 60.0, 4, 8)
    (found,) = summarise([a_trial(last, first, middle)])
    assert (found.before, found.after) == (share([False] * 4), share([True, False] * 2))


def test_a_trial_that_has_only_begun_has_no_after() -> None:
    begun, nothing = summarise([a_trial(an_exam([True])), a_trial(persona="student")])
    assert begun.before is not None
    assert (begun.after, begun.quality_after, begun.until) == (None, None, None)
    assert (nothing.before, nothing.minutes, nothing.sessions) == (None, 0.0, 0)


def test_sessions_until_adherence_are_as_published() -> None:
    reached = a_trial(sessions=[False, True, True, True], seed=0)
    later = a_trial(sessions=[False] * 5 + [True] * 3, seed=1)
    (found,) = summarise([reached, later])
    assert found.until == mean_until([4, 8], 60)
    assert "≥" not in str(found.until)


def test_one_that_was_cut_short_counts_as_far_as_it_went() -> None:
    """Sixty were planned, but after seven nothing is known."""
    reached, cut = a_trial(sessions=[True] * 9, seed=0), a_trial(sessions=[False] * 7, seed=1)
    (found,) = summarise([reached, cut])
    assert found.until == mean_until([3, None], 7)
    assert str(found.until).startswith("≥ 5.0")


def test_groups_are_in_the_order_of_personas_and_of_methods() -> None:
    methods, personas = ("rl", "mine", "combine", "opd"), ("student", "brief")
    trials = [a_trial(method=m, persona=p) for p in personas for m in methods]
    expected = [(p, m) for p in personas for m in ("combine", "opd", "rl", "mine")]
    assert list(grouped(trials)) == expected

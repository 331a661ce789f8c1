"""The phases of learning: the table is complete, and only its transitions are possible."""

import itertools

import pytest

from openclaw_rl.learn.step import TRANSITIONS, IllegalPhase, Phase, Phases


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, Phase)))
def test_only_the_transitions_in_the_table_are_possible(before: Phase, after: Phase) -> None:
    phases = Phases()
    phases.current = before
    if after in TRANSITIONS[before]:
        phases.enter(after)
        assert phases.current is after
    else:
        with pytest.raises(IllegalPhase, match=f"is {before} and cannot become {after}"):
            phases.enter(after)
        assert phases.current is before


def test_every_phase_can_be_reached_and_left() -> None:
    reached = {Phases().current}
    while new := {after for before in reached for after in TRANSITIONS[before]} - reached:
        reached |= new
    assert reached == set(Phase) == set(TRANSITIONS)
    assert all(TRANSITIONS.values())

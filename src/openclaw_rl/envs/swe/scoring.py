"""How an attempt is scored: by the tests that have to pass, and by those that must not break.

fixed  = share of the tests that failed because of the bug and pass now
kept   = share of the tests that passed in spite of the bug and still pass; 0 if the code cannot be loaded
reward = 1                                   if all tests pass: solved
reward = 0.1 · kept + 0.5 · fixed · kept     if a source was changed
reward = 0                                   if none was changed
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.swe.results import TestResult

CHANGED_WEIGHT, FIXED_WEIGHT = 0.1, 0.5


@dataclass(frozen=True, slots=True)
class TestGoal:
    """The tests that decide about an attempt, by their ids."""

    must_pass: Collection[str]
    must_keep: Collection[str]


def score(goal: TestGoal, results: Mapping[str, TestResult], *, changed: bool) -> Outcome:
    """The outcome of an attempt. Its hint is the first problem."""
    if not changed:
        return Outcome(0.0, solved=False, hint="No source was changed.")
    fixed = [passed(results, id_) for id_ in goal.must_pass]
    kept = [passed(results, id_) for id_ in goal.must_keep]
    if all(fixed) and all(kept):
        return Outcome(1.0, solved=True)
    wrong = next((id_ for id_ in [*goal.must_pass, *goal.must_keep] if not passed(results, id_)), "")
    hint = results[wrong].problem if wrong in results else "The tests could not be run."
    loaded = any(result.loaded for result in results.values())
    kept_share = float(loaded) * (sum(kept) / len(kept) if kept else 1.0)
    reward = CHANGED_WEIGHT * kept_share + FIXED_WEIGHT * kept_share * sum(fixed) / len(fixed)
    return Outcome(reward, solved=False, hint=hint)


def passed(results: Mapping[str, TestResult], id_: str) -> bool:
    return id_ in results and results[id_].passed

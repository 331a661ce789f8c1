"""Steps that are refused by the learner or fail the gate."""

import pytest

from openclaw_rl.engines.base import EngineUnavailable, QueueFull, StepRefused
from openclaw_rl.ledger.status import read_status
from openclaw_rl.types import State
from support.learning_run import Examiner, LearningRun, once


async def test_a_refused_steps_batch_is_set_aside_and_listed_and_learning_goes_on(run: LearningRun) -> None:
    await run.start()
    run.learner.hooks["step"] = once(StepRefused("the gradient is not finite"))
    bad = run.judged()
    await run.until(lambda: run.states(bad) == {State.DROPPED})
    await run.trained(*run.judged())
    assert run.sampler.newest_version == 1
    assert run.book.read(bad[0]).reason == "quarantined: the gradient is not finite"
    (listed,) = read_status(run.book.db, None, {}).as_json()["quarantined"]
    assert (listed["step"], listed["turns"], listed["reason"]) == (1, tuple(bad), "the gradient is not finite")


async def test_a_policy_that_fails_the_gate_is_not_promoted_and_its_step_is_undone(run: LearningRun) -> None:
    run.gate = Examiner(lambda version: {0: 0.9, 1: 0.79, 2: 0.81, 3: 0.7}[version])
    await run.start()
    bad = run.judged()
    await run.until(lambda: run.states(bad) == {State.DROPPED})
    assert run.sampler.newest_version == 0
    assert run.sampler.served.keys() == {0}
    assert run.learner.policy == []
    assert "gate" in run.book.read(bad[0]).reason
    good = run.judged()
    await run.trained(*good)
    assert run.sampler.newest_version == 2
    # From now on the new policy's score is the one to compare with.
    worse = run.judged()
    await run.until(lambda: run.states(worse) == {State.DROPPED})
    await run.rest()
    run.check()
    assert run.gate.examined == [0, 1, 2, 3]


async def test_policies_that_fail_the_gate_take_no_place_from_the_one_that_serves(run: LearningRun) -> None:
    run.gate = Examiner(lambda version: 1.0 if version <= 1 else 0.0)
    await run.start()
    await run.trained(*run.judged())
    for _ in range(run.loop.line.policies.keep + 1):
        bad = run.judged()
        await run.until(lambda turns=bad: run.states(turns) == {State.DROPPED})
    assert run.sampler.newest_version == 1
    assert [folder.name for folder in (run.folder / "policies").iterdir()] == ["v000001"]


@pytest.mark.parametrize("error", [QueueFull(7), EngineUnavailable("The worker died.")])
async def test_a_gate_that_cannot_be_asked_costs_no_turn(run: LearningRun, error: Exception) -> None:
    """A busy server refuses the gate's prompts like any other request."""
    asked = once(error)
    run.gate = Examiner(lambda version: asked() or 1.0)
    await run.start()
    await run.trained(*run.judged())
    assert run.outcomes() == ["applied"]

"""A checkpoint is loaded beside the policy that serves, to be compared with it."""

import pytest

from openclaw_rl.api.service import OperationFailed
from openclaw_rl.app.background import BackgroundLoops
from support.learning_run import LearningRun, flat


async def test_a_held_checkpoint_can_be_asked_and_disturbs_nothing(run: LearningRun) -> None:
    await run.start()
    turns = [run.judged() for _ in range(5)]
    await run.trained(*flat(turns))
    loops = BackgroundLoops(None, run.loop, 5.0)
    held = await loops.hold(run.checkpoints[0].version)
    assert run.sampler.served[held] == turns[:2]
    assert run.sampler.newest_version == 5, "the newest policy goes on serving"
    more = run.judged()
    await run.trained(*more)
    assert run.learner.policy == [*turns, more]
    assert run.sampler.newest_version > held, "no number is used twice"
    again = await loops.hold(run.checkpoints[-1].version)
    assert held not in run.sampler.served, "only one is held"
    assert again in run.sampler.served
    await run.kill()
    await run.start()
    await run.trained(*run.judged())
    assert run.learner.policy[:6] == [*turns, more]


async def test_what_is_no_checkpoint_cannot_be_held(run: LearningRun) -> None:
    await run.start()
    with pytest.raises(OperationFailed, match="no checkpoint of policy version 7"):
        await BackgroundLoops(None, run.loop, 5.0).hold(7)
    with pytest.raises(OperationFailed, match="does not learn"):
        await BackgroundLoops(None, None, 5.0).hold(1)

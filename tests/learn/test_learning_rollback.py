"""An owner rolls back to an earlier policy."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.api.service import OperationFailed
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.engines.base import EngineUnavailable, StepRefused
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import training
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.turns import counts as count_turns
from openclaw_rl.types import State
from support.learning_run import Examiner, LearningRun, a_run, flat, once
from support.records import intercept


async def test_going_back_serves_the_earlier_policy_at_once_and_learns_on_from_it(run: LearningRun) -> None:
    await run.start()
    turns = [run.judged() for _ in range(5)]
    await run.trained(*flat(turns))
    version = await run.loop.roll_back(run.checkpoints[0])
    assert run.sampler.newest_version == version == 6
    run.check()
    assert run.learner.policy == turns[:2]
    # Later turns are neither deleted nor trained on again.
    assert run.states(flat(turns)) == {State.APPLIED}
    assert run.outcomes() == ["applied", "applied", "rolled_back", "rolled_back", "rolled_back"]
    more = run.judged()
    await run.trained(*more)
    assert run.learner.policy == [*turns[:2], more]
    await run.kill()
    await run.start()
    await run.trained(*run.judged())
    assert run.learner.policy[:3] == [*turns[:2], more]


@pytest.mark.parametrize("call", ["step", "write_policy", "publish"])
async def test_going_back_while_a_step_is_under_way_leaves_that_step_behind(run: LearningRun, call: str) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(argument: Any) -> None:
        reached.set()
        await go.wait()

    if call == "publish":
        run.sampler.hook = lambda version: hold(version) if version == 5 else None
    else:
        run.learner.hooks[call] = hold
    under_way = run.judged()
    await reached.wait()
    going_back = asyncio.create_task(run.loop.roll_back(run.checkpoints[0]))
    # It serves before the step has ended.
    await run.until(lambda: run.sampler.newest_version > 4)
    assert run.sampler.served[run.sampler.newest_version] == turns[:2]
    run.learner.hooks.clear()
    go.set()
    await going_back
    await run.until(lambda: run.states(under_way) == {State.APPLIED})
    await run.rest()
    run.check()
    # The step's turns are trained on again, from the earlier policy.
    assert run.learner.policy == [*turns[:2], under_way]
    assert "quarantined" not in run.outcomes()
    assert run.loop.trouble == ""


@pytest.mark.parametrize("error", [EngineUnavailable("It died."), StepRefused("the checkpoint cannot be loaded")])
async def test_going_back_that_fails_does_not_leave_the_learner_with_nothing(
    run: LearningRun, error: Exception
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(3)]
    await run.trained(*flat(turns))
    run.learner.hooks["load"] = once(error)
    with pytest.raises(type(error)):
        await run.loop.roll_back(run.checkpoints[0])
    turns.append(run.judged())
    await run.trained(*flat(turns))
    assert run.learner.policy == turns


@pytest.mark.parametrize("retrain", [False, True])
@pytest.mark.parametrize(
    ("call", "steps"),
    [
        *((call, 2) for call in ("add_policy", "publish", "load", "follow", "renumber")),
        *((call, 0) for call in ("reset", "write_policy", "add_policy", "publish", "follow", "save")),
    ],
)
async def test_whatever_fails_while_going_back_everything_agrees_also_after_a_restart(
    run: LearningRun, call: str, steps: int, retrain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    fail_once(run, call, monkeypatch)
    # The ledger alone does not stop a rollback that is saved: it learns of it when it can be written again.
    happened = call == "follow" and not retrain
    with contextlib.nullcontext() if happened else pytest.raises(Exception, match="It failed"):
        await run.loop.roll_back(run.checkpoints[0] if steps else None, retrain=retrain)
    kept = turns[:steps] if happened else turns
    await run.until(lambda: run.loop.phase is Phase.WAITING)
    await run.rest()
    run.check()
    assert run.learner.policy == kept
    await run.kill()
    await run.start()
    more = run.judged()
    await run.trained(*more)
    assert run.learner.policy == [*kept, more]


def fail_once(run: LearningRun, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one part of a rollback fail the first time."""
    if call == "publish":
        run.sampler.hook = once(EngineUnavailable("It failed."))
    elif call == "renumber":
        renumber, hook = run.loop.line.checkpoints.renumber, once(OSError("It failed."))
        monkeypatch.setattr(run.loop.line.checkpoints, "renumber", lambda *given: hook() or renumber(*given))
    elif call in ("add_policy", "follow"):
        change, hook = getattr(training, call), once(LedgerError("It failed."))

        async def failing(*arguments: Any, **named: Any) -> Any:
            hook()
            return await asyncio.wrap_future(run.book.ledger.submit(change, *arguments, **named))

        intercept(monkeypatch, run.book.ledger, change, failing)
    else:
        run.learner.hooks[call] = once(EngineUnavailable("It failed."))


async def test_a_loop_that_wakes_during_a_rollback_learns_on_as_soon_as_it_is_over(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", first_pause=60.0, longest_pause=60.0) as run:
        await run.start()
        turns = [run.judged() for _ in range(2)]
        await run.trained(*flat(turns))
        reached, go = asyncio.Event(), asyncio.Event()

        async def hold(_argument: Any) -> None:
            reached.set()
            await go.wait()

        run.learner.hooks["load"] = hold
        going_back = asyncio.create_task(run.loop.roll_back(run.checkpoints[0]))
        await reached.wait()
        more = run.judged()
        await asyncio.sleep(0.2)  # it has looked for turns meanwhile
        go.set()
        await going_back
        await run.until(lambda: run.states(more) == {State.APPLIED})


@pytest.mark.parametrize(("call", "steps"), [("load", 2), ("ledger", 2), ("reset", 0), ("save", 0), ("ledger", 0)])
async def test_killed_while_going_back_it_either_happened_or_it_did_not(
    run: LearningRun, call: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(6)]
    await run.trained(*flat(turns))
    earlier = run.checkpoints[0]
    assert earlier.step == 2
    reached = asyncio.Event()

    async def hang(*_arguments: Any, **_named: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    write = run.book.ledger.write
    if call == "ledger":
        intercept(monkeypatch, run.book.ledger, training.follow, hang)
    else:
        run.learner.hooks[call] = hang
    going_back = asyncio.create_task(run.loop.roll_back(earlier if steps else None))
    await reached.wait()
    going_back.cancel()
    await run.kill()
    monkeypatch.setattr(run.book.ledger, "write", write)
    await run.start()
    more = run.judged()
    await run.trained(*more)
    # Either all six steps count, or only the earlier ones; then the later turns are not trained on again.
    assert run.learner.policy in ([*turns, more], [*turns[:steps], more])
    assert run.states(flat(turns)) == {State.APPLIED}


async def test_going_back_again_goes_further_back_until_nothing_is_left(run: LearningRun) -> None:
    await run.start()
    turns = [run.judged() for _ in range(7)]
    await run.trained(*flat(turns))
    loops = BackgroundLoops(None, run.loop, 5.0)
    for step in (6, 4, 2):
        await loops.roll_back(None)
        await run.rest()
        run.check()
        assert run.learner.policy == turns[:step]
        assert {checkpoint.step for checkpoint in run.checkpoints} == {2, 4, 6}
    version = await loops.roll_back(None)
    assert run.sampler.served[version] == run.learner.policy == []
    assert run.sampler.newest_version == version
    run.check()
    with pytest.raises(OperationFailed, match="Nothing has been learned"):
        await loops.roll_back(None)


async def test_before_the_first_checkpoint_the_base_model_is_gone_back_to(run: LearningRun) -> None:
    await run.start()
    turns = run.judged()
    await run.trained(*turns)
    assert await BackgroundLoops(None, run.loop, 5.0).roll_back(None) == 2
    assert run.sampler.served[run.sampler.newest_version] == []
    assert run.outcomes() == ["rolled_back"]
    # The turns are neither trained on again nor deleted, also after a restart.
    more = run.judged()
    await run.trained(*more)
    await run.kill()
    await run.start()
    again = run.judged()
    await run.trained(*again)
    assert run.learner.policy == [more, again]
    assert run.states(turns) == {State.APPLIED}


@pytest.mark.parametrize("call", ["reset", "write_policy", "publish"])
async def test_going_back_to_the_base_model_that_fails_changes_nothing(run: LearningRun, call: str) -> None:
    await run.start()
    turns = [run.judged() for _ in range(2)]
    await run.trained(*flat(turns))
    error = EngineUnavailable("It died.")
    if call == "publish":
        run.sampler.hook = once(error)
    else:
        run.learner.hooks[call] = once(error)
    with pytest.raises(EngineUnavailable, match="It died"):
        await run.loop.roll_back(None)
    assert (run.loop.step, run.loop.version) == (2, 2)
    assert run.sampler.served[run.loop.version] == turns
    turns.append(run.judged())
    await run.trained(*flat(turns))
    assert run.learner.policy == turns


async def test_the_gate_measures_again_from_the_policy_that_was_gone_back_to(run: LearningRun) -> None:
    """Otherwise what the policy left behind had reached would be asked of the next one."""
    run.gate = Examiner(lambda version: {0: 0.2, 1: 0.2, 2: 0.2, 3: 0.9, 4: 0.9}.get(version, 0.3))
    await run.start()
    await run.make_steps(4)
    await run.loop.roll_back(run.checkpoints[0])
    assert run.loop.step == 2
    await run.make_steps(1)
    assert run.outcomes()[-1] == "applied"


async def test_the_base_model_can_be_asked_for(run: LearningRun) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    last = run.checkpoints[-1]
    loops = BackgroundLoops(None, run.loop, 5.0)
    await loops.roll_back(0)
    assert run.learner.policy == []
    # The later policy can be restored: its steps count again.
    version = await loops.roll_back(last.version)
    assert run.sampler.served[version] == run.learner.policy == turns
    run.check()
    assert run.outcomes() == ["applied"] * 4
    assert run.states(flat(turns)) == {State.APPLIED}
    counts = count_turns(run.book.db)
    assert (counts.step, counts.states[State.APPLIED]) == (4, 8)
    # A step from here descends from it, also after a restart.
    more = run.judged()
    await run.trained(*more)
    await run.kill()
    await run.start()
    await run.trained(*more, *run.judged())
    assert run.learner.policy[:5] == [*turns, more]


async def test_a_checkpoint_stays_in_its_folder_and_keeps_its_number(run: LearningRun) -> None:
    await run.start()
    await run.make_steps(4)
    folders = [checkpoint.folder for checkpoint in run.checkpoints]
    loops = BackgroundLoops(None, run.loop, 5.0)
    for wanted in (2, 4, 2):
        version = await loops.roll_back(wanted)
        latest = run.checkpoints[-1]
        assert wanted in latest.versions
        assert latest.version == version
        assert sorted(checkpoint.folder for checkpoint in run.checkpoints) == folders
        run.check()
    await run.kill()
    await run.start(learning=False)
    assert run.sampler.newest_version == version
    assert run.checkpoints[-1].step == 2


async def test_the_checkpoint_before_is_one_that_the_policy_was_made_from(run: LearningRun) -> None:
    await run.start()
    turns = await run.make_steps(4)
    loops = BackgroundLoops(None, run.loop, 5.0)
    await loops.roll_back(0)
    await loops.roll_back(4)
    await loops.roll_back(None)
    # Not the base model, although it was saved last.
    assert run.learner.policy == turns[:2]
    run.check()

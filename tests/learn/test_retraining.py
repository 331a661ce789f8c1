"""Training again without deleted turns, while the server runs."""

import asyncio
from typing import Any

import pytest

from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.learn.checkpoints import Checkpoint
from openclaw_rl.ledger import deletion, training
from openclaw_rl.types import State
from support.fakes import read_policy
from support.learning_run import LearningRun, flat
from support.records import intercept


def forget(run: LearningRun, *turns: int) -> None:
    """Delete turns; each has a session of its own."""
    for turn in turns:
        run.book.change(deletion.delete_sessions, [run.book.scalar("SELECT session FROM turns WHERE number = ?", turn)])


def session_each(run: LearningRun, count: int) -> list[int]:
    return [turn for number in range(count) for turn in run.judged(1, session=f"session {number}")]


async def trained_run(run: LearningRun, steps: int) -> list[int]:
    """Make steps of two turns each; the turns."""
    await run.start()
    turns = session_each(run, 2 * steps)
    await run.trained(*turns)
    return turns


async def retrain(run: LearningRun) -> int:
    return await BackgroundLoops(None, run.loop, 5.0).roll_back(None, retrain=True)


def check_gone(run: LearningRun, *gone: int) -> None:
    """No state on disk and no policy that is held was trained on these turns."""
    for folder in (*run.folder.glob("checkpoints/*"), *run.folder.glob("policies/*")):
        assert not set(gone) & set(flat(read_policy(folder))), folder
    for version, policy in run.sampler.served.items():
        assert not set(gone) & set(flat(policy)), version
    assert not set(gone) & set(flat(run.learner.policy))


@pytest.mark.parametrize(("gone", "kept_steps"), [(6, 2), (1, 0)])
async def test_the_others_are_trained_on_again_exactly_once(run: LearningRun, gone: int, kept_steps: int) -> None:
    """Turn 6 was used in step 4, after the checkpoint of step 2; turn 1 was used in step 1."""
    turns = await trained_run(run, 6)
    forget(run, turns[gone])
    version = await retrain(run)
    assert version >= 7
    rest = [turn for turn in turns if turn != turns[gone]]
    # One turn is left over until there is another for a batch.
    more = run.judged(1)
    await run.trained(*rest, *more)
    assert sorted(flat(run.learner.policy)) == sorted([*rest, *more])
    assert run.learner.policy[:kept_steps] == [turns[2 * step : 2 * step + 2] for step in range(kept_steps)]
    check_gone(run, turns[gone])
    # Also after a restart.
    await run.kill()
    await run.start()
    await run.trained(*rest, *more, *run.judged())
    assert sorted(flat(run.learner.policy))[: len(rest)] == rest


async def test_a_checkpoint_of_an_older_program_is_covered(run: LearningRun) -> None:
    """The ledger of a run from before the record of policies has no row for a state that was saved again."""
    turns = await trained_run(run, 4)
    await run.loop.roll_back(run.checkpoints[0])
    older = run.loop.version
    await run.trained(*turns[:4], *session_each(run, 4))
    await run.kill()
    run.book.change(lambda db: db.execute("DELETE FROM policies WHERE version = ?", (older,)))
    await run.start()
    forget(run, turns[0])
    await retrain(run)
    check_gone(run, turns[0])


async def test_a_policy_without_the_turns_serves_on(run: LearningRun) -> None:
    """They are only in a policy that was rolled back, so nothing has to be trained again."""
    turns = await trained_run(run, 4)
    await run.loop.roll_back(run.checkpoints[0])
    version = run.loop.version
    forget(run, turns[7])
    assert await retrain(run) == version
    run.check()
    assert run.learner.policy == [turns[:2], turns[2:4]]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [2]
    check_gone(run, turns[7])
    assert run.states(turns[:7]) == {State.APPLIED}


@pytest.mark.parametrize("call", ["load", "ledger", "renumber", "remove"])
async def test_killed_in_between_no_turn_is_lost_and_none_is_trained_on_twice(
    run: LearningRun, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = await trained_run(run, 5)
    forget(run, turns[5])
    reached = asyncio.Event()

    async def hang(*_arguments: Any, **_named: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    class KilledHere(BaseException):
        pass

    def die(*_arguments: Any) -> Checkpoint:
        raise KilledHere

    with monkeypatch.context() as patch:
        if call == "load":
            run.learner.hooks["load"] = hang
        elif call == "ledger":
            intercept(patch, run.book.ledger, training.follow, hang)
        else:
            patch.setattr(run.loop.line.checkpoints, call, die)
        work = asyncio.create_task(retrain(run))
        work.add_done_callback(lambda _task: reached.set())
        await reached.wait()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await run.kill()
    await run.start()
    await run.until(lambda: run.loop.phase == "waiting")
    await retrain(run)
    rest = [turn for turn in turns if turn != turns[5]]
    more = run.judged(1)
    await run.trained(*rest, *more)
    assert sorted(flat(run.learner.policy)) == sorted([*rest, *more])
    check_gone(run, turns[5])

"""What was learned survives a crash: the policy that served last serves again, and lost steps are made again."""

import asyncio
import math
from pathlib import Path
from uuid import uuid4

import pytest

from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.engines.base import StepRefused
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.learn.rollback import roll_back_offline
from openclaw_rl.ledger import deletion, groups
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.types import State
from support.learning_run import LearningRun, a_run, dies, flat, forever, once

ALWAYS = math.inf


def recoveries(run: LearningRun) -> list[str]:
    return sorted(path.name for path in (run.folder / "recovery").glob("*"))


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        *((2, share) for share in (0.0, 0.05, ALWAYS)),
        (19, 0.05),
        *(pytest.param(19, share, marks=pytest.mark.more) for share in (0.0, ALWAYS)),
    ],
)
async def test_the_policy_that_served_last_serves_again_at_once(tmp_path: Path, steps: int, share: float) -> None:
    async with a_run(tmp_path / "run", save_interval=20, recovery_share=share) as run:
        await run.start()
        turns = await run.make_steps(steps)
        await run.kill()
        assert run.checkpoints == []
        await run.start(learning=False)
        assert run.sampler.newest_version == steps
        assert run.sampler.served[steps] == turns
        run.learn()
        await run.trained(*flat(turns))
        # The same policy, so nothing had to be published, and the record is what it would have been without the crash.
        assert set(run.sampler.served) == {0, steps}
        assert run.outcomes() == ["applied"] * steps
        assert share != ALWAYS or "step" not in run.learner.calls, "a step that was saved is not made again"
        turns += await run.make_steps(1)
        assert run.learner.policy == turns
        assert run.sampler.newest_version == steps + 1


async def test_a_server_that_does_not_learn_serves_it_too(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = await run.make_steps(3)
        await run.kill()
        assert await run.serve_only() == 3
        assert run.sampler.served[3] == turns


async def test_killed_while_lost_steps_are_made_again_it_still_serves_and_they_are_still_made(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = await run.make_steps(6)
        for made in (1, 3):
            await run.kill()
            await run.start(learning=False)
            assert run.sampler.newest_version == 6
            reached = asyncio.Event()
            run.learner.hooks["step"] = lambda _sequences, made=made, reached=reached: (
                hold(reached) if len(run.learner.policy) == made else None
            )
            run.learn()
            await reached.wait()
            assert run.sampler.served[run.sampler.newest_version] == turns
            # Saved in the middle, as when the server is stopped there.
            run.settings["recovery_share"] = ALWAYS
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.policy == turns
        assert run.outcomes() == ["applied"] * 6


async def hold(reached: asyncio.Event) -> None:
    reached.set()
    await forever()


async def test_stopped_while_lost_steps_are_made_again_the_rest_is_made_at_the_next_start(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = await run.make_steps(5)
        await run.kill()
        await run.start(learning=False)
        run.learner.hooks["step"] = lambda _sequences: stop() if len(run.learner.policy) == 2 else None

        def stop() -> None:
            run.loop._stopping = True

        run.learn()
        await run.until(lambda: run.loop.step == 3)
        await run.loop.finish()
        assert [checkpoint.step for checkpoint in run.checkpoints] == [3]
        await run.kill()
        await run.start(learning=False)
        assert run.sampler.served[run.sampler.newest_version] == turns
        run.learn()
        await run.trained(*flat(turns))
        assert run.learner.calls.count("step") == 2
        assert run.outcomes() == ["applied"] * 5


async def test_a_learner_that_dies_does_not_take_the_policy_that_serves_back(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = await run.make_steps(4)
        run.learner.hooks["step"] = dies()
        published: list[int] = []
        run.sampler.hook = published.append
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert published == [5]
        assert run.outcomes() == ["applied"] * 5


async def test_if_lost_steps_lead_to_another_policy_it_serves_under_a_number_of_its_own(tmp_path: Path) -> None:
    """On a GPU, sums can differ in their last bits."""
    async with a_run(tmp_path / "run", save_interval=20) as run:
        for expected in (0, 4):
            await run.start(learning=False)
            assert run.sampler.newest_version == expected
            run.learner.hooks["write_policy"] = lambda folder: (folder / "noise").write_text(uuid4().hex) and None
            run.learn()
            if not expected:
                turns = await run.make_steps(4)
                await run.kill()
        await run.trained(*flat(turns))
        assert set(run.sampler.served) == {0, 4, 5}
        assert run.outcomes() == ["applied"] * 3 + ["undone", "applied"]
        await run.kill()
        await run.start(learning=False)
        assert run.sampler.newest_version == 5


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_lost_step_whose_turn_was_forgotten_is_left_out_and_the_others_are_made(
    tmp_path: Path, lost: int
) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = []
        for number in range(3):
            turns.append([*run.judged(1), *run.judged(1, session=f"secret {number}")])
            await run.trained(*turns[-1])
        await run.kill()
        session = run.book.scalar("SELECT number FROM sessions WHERE id = ?", f"secret {lost}")
        run.book.change(deletion.delete_sessions, [session])
        await run.start(learning=False)
        assert run.sampler.newest_version == 3
        run.learn()
        left = [batch for number, batch in enumerate(turns) if number != lost]
        await run.until(lambda: run.states(flat(left)) == {State.APPLIED} and run.loop.step == 2)
        # The turn that is left waits for another.
        waiting = turns[lost][0]
        assert run.states([waiting]) == {State.JUDGED}
        more = run.judged(1)
        await run.until(lambda: run.states(more) == {State.APPLIED})
        await run.rest()
        run.check()
        assert run.learner.policy == [*left, [waiting, *more]]


async def test_a_lost_step_that_is_refused_this_time_is_set_aside_and_the_others_are_made(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = await run.make_steps(3)
        await run.kill()
        await run.start(learning=False)
        run.learner.hooks["step"] = once(StepRefused("not this one"))
        run.learn()
        await run.until(lambda: run.states(flat(turns[1:])) == {State.APPLIED})
        await run.rest()
        run.check()
        assert run.learner.policy == turns[1:]
        assert run.states(turns[0]) == {State.DROPPED}


async def test_rolled_back_before_lost_steps_are_made_again_their_turns_are_not_trained_on_again(
    run: LearningRun,
) -> None:
    await run.start()
    turns = await run.make_steps(4)
    run.settings["save_interval"] = 20
    await run.kill()
    await run.start()
    turns += await run.make_steps(3)
    await run.kill()
    await run.start(learning=False)
    assert run.sampler.served[run.sampler.newest_version] == turns
    # The last checkpoint before the policy that serves is of step 4.
    await BackgroundLoops(None, run.loop, 5.0).roll_back(None)
    run.learn()
    more = run.judged()
    await run.until(lambda: run.states(more) == {State.APPLIED})
    await run.rest()
    run.check()
    assert run.learner.policy == [*turns[:4], more]
    assert run.states(flat(turns)) == {State.APPLIED}


async def test_a_smaller_batch_stays_the_same_batch_when_its_step_is_made_again(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", batch_size=4, batch_timeout=0.05, save_interval=20) as run:
        await run.start()
        turns = []
        for count in (3, 1, 4, 2):
            turns.append(run.judged(count))
            await run.trained(*turns[-1])
        await run.kill()
        run.settings |= {"batch_timeout": None, "batch_size": 5}
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


async def test_one_recovery_state_is_kept_until_a_checkpoint_holds_its_steps(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=3, recovery_share=ALWAYS) as run:
        await run.start()
        found = []
        for _ in range(4):
            await run.make_steps(1)
            found.append(recoveries(run))
        assert found == [["step-000001-v1"], ["step-000002-v2"], [], ["step-000004-v4"]]
        await run.kill()
        await run.start()
        turns = flat(await run.make_steps(2))
        await run.trained(*turns)
        # The checkpoint lists all steps since the one before it, also those that were in recovery states.
        assert [batch.step for batch in run.checkpoints[-1].batches] == [4, 5, 6]


async def test_a_recovery_state_that_cannot_be_written_costs_nothing_but_the_recovery(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20, recovery_share=ALWAYS) as run:
        await run.start()
        run.learner.hooks["save_recovery"] = once(OSError(28, "No space left on device"))
        turns = await run.make_steps(2)
        assert run.outcomes() == ["applied"] * 2
        assert recoveries(run) == ["step-000002-v2"]
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))


async def test_stopped_in_the_middle_of_a_step_that_takes_too_long_nothing_is_lost(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20, recovery_share=ALWAYS) as run:
        await run.start()
        turns = await run.make_steps(2)
        reached = asyncio.Event()
        run.learner.hooks["step"] = lambda _sequences: hold(reached)
        turns.append(run.judged())
        await reached.wait()
        await BackgroundLoops(None, run.loop, 0.05).stop()
        await run.kill()
        await run.start(learning=False)
        assert run.sampler.served[run.sampler.newest_version] == turns[:2]
        run.learn()
        await run.trained(*flat(turns))
        assert run.learner.calls.count("step") == 1


async def test_an_older_checkpoint_that_is_asked_for_serves_itself(run: LearningRun) -> None:
    run.settings["recovery_share"] = ALWAYS
    await run.start()
    turns = await run.make_steps(5)
    await run.kill()
    await run.start(str(run.checkpoints[0].folder), learning=False)
    assert run.sampler.served[run.sampler.newest_version] == turns[:2]
    run.learn()
    await run.trained(*flat(turns))
    assert run.learner.policy[:2] == turns[:2]
    # The recovery state of the line that was left is gone with the next save.
    assert recoveries(run) == [f"step-{run.loop.step:06d}-v{run.loop.version}"]


async def test_rolled_back_without_a_server_lost_steps_are_not_trained_on_again(tmp_path: Path) -> None:
    """The step before counts from the policy that the next start would serve, and not from the last saved one."""
    async with a_run(tmp_path / "run", save_interval=2, recovery_share=0.0) as run:
        await run.start()
        turns = await run.make_steps(3)
        await run.kill()
        with open_ledger(run.folder) as ledger:
            checkpoints = Checkpoints.of_run(run.folder, 10)
            version = roll_back_offline(ledger, checkpoints, None)
        await run.start()
        assert run.sampler.newest_version == version
        assert run.sampler.served[version] == turns[:2]
        assert run.book.ledger.read(groups.trainable) == 0

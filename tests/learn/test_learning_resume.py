"""A run goes on after a crash, from a checkpoint, or from the base model."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.ledger import training
from openclaw_rl.types import State
from support.learning_run import SECONDS, LearningRun, a_run, flat, once
from support.records import intercept


@pytest.mark.parametrize("call", ["step", "write_policy", "publish", "apply", "save", "saved"])
@pytest.mark.parametrize("steps", [0, 1, *(pytest.param(steps, marks=pytest.mark.more) for steps in (2, 3))])
async def test_killed_at_any_point_of_a_step_every_turn_is_trained_on_once(
    run: LearningRun, call: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(steps)]
    await run.trained(*flat(turns))
    reached = asyncio.Event()

    async def hang(*_arguments: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    write = run.book.ledger.write
    if call == "publish":
        run.sampler.hook = hang
    elif call == "apply":
        intercept(monkeypatch, run.book.ledger, training.apply_step, hang)
    elif call == "saved":
        monkeypatch.setattr(run.loop.steps.reporter, "write", lambda report: reached.set())
    else:
        run.learner.hooks[call] = hang
    turns.append(run.judged())
    if call == "save":
        turns.append(run.judged())
    async with asyncio.timeout(SECONDS):
        await reached.wait()
    await run.kill()
    monkeypatch.setattr(run.book.ledger, "write", write)
    await run.start()
    await run.trained(*flat(turns))
    assert run.learner.policy == turns


async def test_if_the_policy_that_served_last_is_gone_the_checkpoints_serves_before_anything_is_learned(
    run: LearningRun,
) -> None:
    await run.start()
    turns = run.judged(6)
    await run.trained(*turns)
    await run.kill()
    shutil.rmtree(run.folder / "policies")
    await run.start(learning=False)
    assert run.sampler.newest_version == 2
    assert run.sampler.served[2] == run.applied() == [turns[:2], turns[2:4]]
    assert run.learner.calls == []
    assert run.states(turns[4:]) == {State.JUDGED}


async def test_many_steps_that_were_lost_are_made_again_without_losing_a_turn(tmp_path: Path) -> None:
    """Repeated steps do not make their turns stale."""
    async with a_run(tmp_path / "run", save_interval=100, max_staleness=2) as run:
        await run.start()
        turns = await run.make_steps(7)
        waiting = run.judged(1)
        await run.kill()
        await run.start()
        await run.until(lambda: run.states(flat(turns)) <= {State.APPLIED, State.DROPPED})
        await run.trained(*flat(turns))
        turns.append([*waiting, *run.judged(1)])
        await run.trained(*turns[-1])
        assert run.learner.policy == turns


async def test_a_damaged_checkpoint_is_named_and_its_steps_are_made_again(
    run: LearningRun, caplog: pytest.LogCaptureFixture
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    await run.kill()
    damaged = run.checkpoints[-1]
    (damaged.folder / "adapter_model.safetensors").write_text("[]")
    await run.start()
    assert damaged.folder.name in caplog.text
    await run.trained(*flat(turns))
    assert run.outcomes().count("applied") == 4


async def test_beginning_anew_keeps_what_was_trained_trained(run: LearningRun) -> None:
    await run.start()
    old = [run.judged() for _ in range(3)]
    await run.trained(*flat(old))
    await run.kill()
    await run.start("none", learning=False)
    assert run.sampler.newest_version == 0
    run.learn()
    new = run.judged()
    await run.until(lambda: run.states(new) == {State.APPLIED})
    await run.rest()
    assert run.learner.policy == [new]
    assert run.sampler.served[run.sampler.newest_version] == [new]
    # The next start continues from here.
    policy = run.learner.policy
    await run.kill()
    await run.start()
    more = run.judged()
    await run.until(lambda: run.states(more) == {State.APPLIED})
    await run.rest()
    assert run.learner.policy == [*policy, more]
    # The old steps are not in the policy, so they no longer count. Their turns are not trained on again.
    assert run.applied() == [*policy, more]
    assert run.states(flat(old)) == {State.APPLIED}
    assert run.loop.step == 2


async def test_beginning_anew_is_remembered_also_if_nothing_had_been_saved(run: LearningRun) -> None:
    await run.start()
    old = run.judged()
    await run.trained(*old)
    await run.kill()
    assert run.checkpoints == []
    await run.start("none")
    await run.until(lambda: "reset" in run.learner.calls)
    await run.rest()
    await run.kill()
    await run.start()
    new = run.judged()
    await run.until(lambda: run.states(new) == {State.APPLIED})
    await run.rest()
    assert run.learner.policy == run.applied() == [new]
    assert run.states(old) == {State.APPLIED}


async def test_another_runs_checkpoint_gives_its_weights_and_nothing_else(tmp_path: Path) -> None:
    async with a_run(tmp_path / "other") as other:
        await other.start()
        learned = [other.judged(), other.judged()]
        await other.trained(*flat(learned))
        folder = str(other.checkpoints[-1].folder)
    async with a_run(tmp_path / "run") as run:
        await run.start(folder, learning=False)
        assert run.sampler.served[run.sampler.newest_version] == learned
        run.learn()
        turns = run.judged()
        await run.until(lambda: run.states(turns) == {State.APPLIED})
        await run.rest()
        assert run.learner.policy == [*learned, turns]
        assert run.applied() == [turns]
        await run.kill()
        # Without the folder the run continues from its own checkpoint.
        await run.start()
        more = run.judged()
        await run.until(lambda: run.states(more) == {State.APPLIED})
        await run.rest()
        assert run.learner.policy == [*learned, turns, more]


async def test_an_earlier_checkpoint_of_the_run_is_gone_on_from_and_stays_the_one_that_counts(run: LearningRun) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    earlier = run.checkpoints[0]
    assert earlier.step == 2
    await run.kill()
    # The same turns in other batches, which must not be mixed up with the first ones.
    run.settings |= {"batch_size": 1, "max_steps": 3}
    await run.start(str(earlier.folder), learning=False)
    run.learner.hooks["step"] = once(StepRefused("not this one"))
    run.learn()
    await run.until(lambda: run.loop.step == 3)
    await run.kill()
    (aside,) = (turn for turn in flat(turns) if run.book.state(turn) is State.DROPPED)
    run.settings["max_steps"] = 1000
    await run.start()
    await run.until(lambda: State.JUDGED not in run.states(flat(turns)))
    await run.rest()
    run.check()
    assert sorted(flat(run.learner.policy)) == sorted(set(flat(turns)) - {aside})


async def test_a_policy_version_is_never_used_for_two_policies(run: LearningRun) -> None:
    """Also a number that only a checkpoint or only a turn has."""
    seen: dict[int, list[list[int]]] = {}

    def look() -> None:
        for version, policy in run.sampler.served.items():
            assert seen.setdefault(version, policy) == policy

    for resume in ("auto", "auto", "none", "auto"):
        await run.start(resume)
        for _ in range(3):
            await run.until(lambda: bool(run.learner.calls))
            turns = run.judged()
            await run.until(lambda turns=turns: run.states(turns) == {State.APPLIED})
            await run.rest()
        look()
        await run.loop.roll_back(run.checkpoints[0])
        look()
        await run.kill()
    versions = [checkpoint.version for checkpoint in run.checkpoints]
    assert len(set(versions)) == len(versions)


@pytest.mark.parametrize("call", ["write_policy", "save"])
async def test_what_a_crash_left_unfinished_is_removed_at_the_next_start(run: LearningRun, call: str) -> None:
    await run.start()
    reached = asyncio.Event()

    async def hang(folder: Path) -> None:
        (folder / "half").write_text("a policy that is being written")
        reached.set()
        await asyncio.Event().wait()

    run.learner.hooks[call] = hang
    turns = [run.judged(), run.judged()]
    await reached.wait()
    # A process that is killed cleans nothing up.
    (copy,) = run.folder.rglob(".unfinished-*")
    shutil.copytree(copy, kept := run.folder / "copy")
    await run.kill()
    shutil.move(kept, copy)
    await run.start(learning=False)
    assert not list(run.folder.rglob(".unfinished-*"))
    run.learn()
    await run.trained(*flat(turns))

"""Learner, sampler, ledger or disk fail: no turn is lost or trained on twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import EngineUnavailable, StepRefused
from openclaw_rl.ledger import training
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.types import State
from support.learning_run import LearningRun, a_run, dies, flat, once
from support.records import intercept


async def test_a_learner_that_dies_is_brought_back_to_the_checkpoint_and_no_turn_is_lost_or_doubled(
    run: LearningRun,
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(3)]
    await run.trained(*flat(turns))
    assert [checkpoint.step for checkpoint in run.checkpoints] == [2]
    run.learner.hooks["step"] = dies()
    turns.append(run.judged())
    await run.trained(*flat(turns))
    # The third step was not in the checkpoint, and is made again under the same version.
    assert run.learner.policy == turns
    assert run.outcomes() == ["applied"] * 4
    assert run.learner.calls.count("step") == 6
    assert run.loop.trouble == ""


async def test_a_batch_that_kills_the_learner_twice_is_set_aside(tmp_path: Path) -> None:
    """Also if lost steps have to be made again in between."""
    async with a_run(tmp_path / "run", save_interval=10) as run:
        await run.start()
        good = [run.judged(), run.judged()]
        await run.trained(*flat(good))
        deadly = run.judged()
        run.learner.hooks["step"] = dies(100, lambda turns: deadly[0] in turns)
        await run.until(lambda: run.states(deadly) == {State.DROPPED})
        assert "died" in run.book.read(deadly[0]).reason
        more = run.judged()
        await run.trained(*flat(good), *more)
        assert run.learner.policy == [*good, more]
        assert run.learner.calls.count("start") == 3


async def test_a_sampler_that_fails_is_not_the_batchs_fault(run: LearningRun) -> None:
    await run.start()
    left = [EngineUnavailable("The worker died.")] * 5

    def fail(_version: int) -> None:
        if left:
            raise left.pop()

    run.sampler.hook = fail
    await run.trained(*run.judged())
    assert not left
    assert "quarantined" not in run.outcomes()


@pytest.mark.parametrize("error", [StepRefused("disk: No space left on device"), EngineUnavailable("It died.")])
async def test_a_policy_that_cannot_be_written_is_not_the_batchs_fault(run: LearningRun, error: Exception) -> None:
    """And the learner does not keep a step that the ledger does not know."""
    await run.start()
    left = [error] * 3

    def fail(_folder: Path) -> None:
        if left:
            raise left.pop()

    run.learner.hooks["write_policy"] = fail
    turns = [run.judged(), run.judged()]
    await run.trained(*flat(turns))
    assert run.learner.policy == turns
    assert "quarantined" not in run.outcomes()


@pytest.mark.parametrize("error", [StepRefused("disk: No space left on device"), OSError(28, "No space left")])
async def test_a_checkpoint_that_cannot_be_written_costs_no_learning(
    run: LearningRun, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    await run.start()

    def fail(_folder: Path) -> None:
        raise error

    run.learner.hooks["save"] = fail
    turns = [run.judged() for _ in range(3)]
    await run.trained(*flat(turns))
    assert run.outcomes() == ["applied"] * 3
    assert run.checkpoints == []
    assert "No space left" in caplog.text
    # The next checkpoint holds all steps that were in none.
    del run.learner.hooks["save"]
    turns.append(run.judged())
    await run.trained(*turns[-1])
    (checkpoint,) = run.checkpoints
    assert [list(batch.turns) for batch in checkpoint.batches] == turns


async def test_a_ledger_that_cannot_be_written_costs_no_turn(run: LearningRun, monkeypatch: pytest.MonkeyPatch) -> None:
    await run.start()
    write = run.book.ledger.write
    left = [LedgerError("database is locked")] * 2

    async def fail(*arguments: Any) -> None:
        if left:
            raise left.pop()
        await write(training.apply_step, *arguments)

    intercept(monkeypatch, run.book.ledger, training.apply_step, fail)
    await run.trained(*run.judged())


@pytest.mark.parametrize("call", [training.claim, training.apply_step])
async def test_a_locked_ledger_costs_no_step_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    async with a_run(tmp_path / "run", save_interval=100) as run:
        await run.start()
        turns = [run.judged()]
        await run.trained(*turns[0])
        write, fail = run.book.ledger.write, once(LedgerError("database is locked"))

        async def locked(*arguments: Any) -> Any:
            fail()
            return await write(call, *arguments)

        intercept(monkeypatch, run.book.ledger, call, locked)
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert run.outcomes() == ["applied", "applied"]
        assert run.learner.calls.count("reset") == 1


async def test_a_sampler_that_fails_costs_no_step_that_was_made(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=100) as run:
        await run.start()
        turns = [run.judged()]
        await run.trained(*turns[0])
        run.sampler.hook = once(EngineUnavailable("The worker died."))
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert run.outcomes() == ["applied", "applied"]
        assert run.learner.policy == turns


async def test_steps_that_are_lost_with_a_learner_are_made_again_of_all_their_turns(tmp_path: Path) -> None:
    """Repeated steps do not make their turns stale."""
    async with a_run(tmp_path / "run", save_interval=100, max_staleness=2) as run:
        await run.start()
        turns = await run.make_steps(7)
        run.learner.hooks["step"] = dies()
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


async def test_while_nothing_can_be_trained_the_status_says_why(run: LearningRun) -> None:
    await run.start(learning=False)

    def broken() -> None:
        raise EngineUnavailable("The model's folder is gone.")

    run.learner.hooks["start"] = broken
    run.learn()
    await run.until(lambda: run.loop.status() == "suspended: The model's folder is gone.")
    run.learner.hooks.clear()
    await run.trained(*run.judged())
    assert "suspended" not in run.loop.status()


async def test_a_damaged_turn_is_dropped_and_the_others_are_trained_on(run: LearningRun) -> None:
    damaged, other = run.judged()
    run.book.damage(damaged)
    await run.start()
    await run.until(lambda: run.book.scalar("SELECT reason FROM turns WHERE number = ?", damaged)[:9] == "damaged: ")
    third, fourth, fifth = *run.judged(), run.judged()[0]
    await run.until(lambda: run.loop.step == 2)
    assert run.states([other, third, fourth, fifth]) == {State.APPLIED}

"""A server that stops saves what it has learned."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.engines.base import EngineUnavailable, StepStopped
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import training
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.types import State
from support.learning_run import SECONDS, LearningRun, a_run, dies, flat, once
from support.records import intercept


async def test_finishing_saves_what_no_checkpoint_has(run: LearningRun) -> None:
    await run.start()
    turns = run.judged()
    await run.trained(*turns)
    assert run.checkpoints == []
    await BackgroundLoops(None, run.loop, 5.0).stop()
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1]
    await run.kill()
    await run.start()
    await run.trained(*turns)
    assert run.outcomes() == ["applied"]


async def test_finishing_without_a_new_step_writes_no_checkpoint(run: LearningRun) -> None:
    await run.start()
    await run.make_steps(2)
    await run.loop.finish()
    await run.kill()
    await run.start()
    await run.rest()
    await run.loop.finish()
    assert "save" not in run.learner.calls
    assert [checkpoint.step for checkpoint in run.checkpoints] == [2]


async def test_finishing_does_not_wait_for_a_learner_that_is_only_starting(run: LearningRun) -> None:
    await run.start(learning=False)
    run.learner.hooks["start"] = asyncio.Event().wait
    run.learn()
    await run.until(lambda: "start" in run.learner.calls)
    async with asyncio.timeout(SECONDS):
        await run.loop.finish()


async def test_finishing_after_a_passing_failure_saves_the_steps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_run(tmp_path / "run", save_interval=100) as run:
        await run.start()
        await run.make_steps(1)

        async def locked(*_: Any) -> None:
            raise LedgerError("database is locked")

        intercept(monkeypatch, run.book.ledger, training.claim, locked)
        run.judged()
        await run.until(lambda: run.loop.trouble == "database is locked")
        await run.loop.finish()
        assert [checkpoint.step for checkpoint in run.checkpoints] == [1]


async def test_finishing_lets_a_step_end_and_begins_no_other(run: LearningRun) -> None:
    await run.start()
    go = asyncio.Event()
    run.learner.hooks["step"] = lambda _sequences: go.wait()
    turns = [run.judged(), run.judged()]
    await run.until(lambda: "step" in run.learner.calls)
    assert run.loop.status() == "training step 1"
    finishing = asyncio.create_task(run.loop.finish())
    await asyncio.sleep(0.01)
    go.set()
    await finishing
    assert run.applied() == turns[:1]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1]
    await run.kill()
    assert run.applied() == turns[:1]
    await run.start()
    await run.trained(*flat(turns))


async def test_finishing_after_the_learner_has_died_does_not_save_an_empty_policy(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=10, first_pause=10 * SECONDS) as run:
        await run.start()
        turns = [run.judged()]
        await run.trained(*turns[0])
        run.learner.hooks["step"] = dies()
        turns.append(run.judged())
        await run.until(lambda: bool(run.loop.trouble))
        await BackgroundLoops(None, run.loop, 5.0).stop()
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


async def test_finishing_after_it_died_while_nobody_could_go_back_does_not_save_an_empty_policy(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", first_pause=10 * SECONDS) as run:
        await run.start()
        turns = [run.judged() for _ in range(3)]
        await run.trained(*flat(turns))

        async def die(_sequences: Any) -> None:
            run.sampler.hook = once(EngineUnavailable("The worker died."))
            with contextlib.suppress(EngineUnavailable):
                await run.loop.roll_back(run.checkpoints[0])
            raise EngineUnavailable("The learner's process ended.")

        run.learner.hooks["step"] = die
        turns.append(run.judged())
        await run.until(lambda: run.loop.phase is Phase.UNPREPARED)
        await run.loop.finish()
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


async def test_a_step_that_takes_too_long_is_taken_back_and_the_steps_before_it_are_saved(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=20) as run:
        await run.start()
        turns = await run.make_steps(3)

        async def take_long(_sequences: Any) -> None:
            await run.learner.stopped.wait()
            raise StepStopped("the step was stopped")

        run.learner.hooks["step"] = take_long
        turns.append(run.judged())
        await run.until(lambda: run.learner.calls[-1] == "step")
        await BackgroundLoops(None, run.loop, 1.0).stop()
        assert [checkpoint.step for checkpoint in run.checkpoints] == [3]
        assert run.outcomes() == ["applied"] * 3
        assert run.states(turns[-1]) == {State.JUDGED}
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.calls.count("step") == 1

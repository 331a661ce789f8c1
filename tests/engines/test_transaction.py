"""The training step above an engine's primitives, with primitives that a test scripts."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import (
    EngineUnavailable,
    LearnerCapabilities,
    PassResult,
    PolicyRef,
    SpanLogprobs,
    StepRefused,
    StepStopped,
)
from openclaw_rl.engines.transaction import TransactionalLearner
from openclaw_rl.types import LossSettings, Span, TrainingSequence
from support.training_settings import taken_out

SEQUENCE = TrainingSequence([1, 2, 3, 4], [Span(7, 2, 4, [-1.0, -1.0], [1.0, 1.0])])


class ScriptedPrimitives:
    """Implements `TrainingPrimitives`: a pass takes a hook's time, and may raise what the hook raises."""

    has_dropout = False
    capabilities = LearnerCapabilities(frozenset())

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: Exception | None = None
        self.passing, self.stopped = asyncio.Event(), asyncio.Event()
        self.waits = False

    def describe(self) -> str:
        return "scripted"

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.calls.append("close")

    async def reset(self) -> None: ...

    def stop_step(self) -> None:
        self.calls.append("stop")
        self.stopped.set()

    def pause_step(self, *, paused: bool) -> None:
        self.calls.append("pause" if paused else "go on")

    async def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        self.passing.set()
        if self.waits:
            await self.stopped.wait()
            raise StepStopped("the step was stopped")
        if self.fails:
            raise self.fails
        return PassResult(0.5, clipped=1, kl_base=0.5, tokens=4, response_tokens=2, logprobs=[[[-1.0, -1.0]]])

    async def optim_step(self) -> float:
        return 1.0

    async def snapshot(self) -> str:
        return "before"

    async def restore(self, snapshot: str) -> None:
        self.calls.append(f"restore {snapshot}")

    async def score(self, sequences: Sequence[TrainingSequence], *, base: bool = False) -> SpanLogprobs:
        self.calls.append("score base" if base else "score")
        return [[[-2.0, -2.0] if base else [-1.0, -1.0]] for _ in sequences]

    async def write_policy(self, folder: Path) -> PolicyRef:
        raise NotImplementedError

    async def save(self, folder: Path, steps: int, *, lasting: bool = True) -> None: ...

    async def load(self, folder: Path) -> int:
        return 0


def learner(**given: Any) -> tuple[TransactionalLearner, ScriptedPrimitives]:
    primitives = ScriptedPrimitives()
    return TransactionalLearner(primitives, taken_out(given)), primitives


async def test_after_an_unknown_failure_the_policy_in_training_is_dropped() -> None:
    trained, primitives = learner()
    primitives.fails = EngineUnavailable("The process ended.")
    with pytest.raises(EngineUnavailable):
        await trained.step([SEQUENCE])
    assert primitives.calls[-1] == "close"
    assert trained.steps == 0


async def test_a_step_that_is_given_up_drops_the_policy_in_training() -> None:
    trained, primitives = learner()
    primitives.waits = True
    step = asyncio.create_task(trained.step([SEQUENCE]))
    await primitives.passing.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    assert primitives.calls[-1] == "close"


async def test_a_refused_step_is_restored_and_keeps_the_engine() -> None:
    trained, primitives = learner()
    primitives.fails = StepRefused("too large")
    with pytest.raises(StepRefused, match="too large"):
        await trained.step([SEQUENCE])
    assert primitives.calls == ["restore before"]


async def test_stopping_reaches_the_pass_that_is_computed() -> None:
    trained, primitives = learner()
    trained.stop_step()
    assert primitives.calls == [], "there is no step to stop"
    primitives.waits = True
    step = asyncio.create_task(trained.step([SEQUENCE]))
    await primitives.passing.wait()
    trained.stop_step()
    with pytest.raises(StepStopped):
        await step
    assert primitives.calls == ["stop", "restore before"]


async def test_stopping_during_the_snapshot_ends_the_step_before_its_first_pass() -> None:
    trained, primitives = learner()
    taken, go = asyncio.Event(), asyncio.Event()

    async def snapshot() -> str:
        taken.set()
        await go.wait()
        return "before"

    primitives.snapshot = snapshot  # type: ignore[method-assign]
    step = asyncio.create_task(trained.step([SEQUENCE]))
    await taken.wait()
    trained.stop_step()
    go.set()
    with pytest.raises(StepStopped):
        await step
    assert (primitives.passing.is_set(), primitives.calls) == (False, []), "nothing was begun, stopped or closed"
    await trained.step([SEQUENCE])
    assert trained.steps == 1


async def test_shares_are_of_the_response_tokens() -> None:
    trained, primitives = learner(loss=LossSettings(kl_coef=0.1))
    result = await trained.step([SEQUENCE])
    assert (result.clip_fraction, result.kl_base) == (0.5, 0.25)
    assert "score base" not in primitives.calls, "the loss has computed the distance already"


async def test_the_distance_from_the_base_model_is_measured_once_there_is_one() -> None:
    trained, primitives = learner()
    assert (await trained.step([SEQUENCE])).kl_base == 0
    assert "score base" not in primitives.calls
    assert (await trained.step([SEQUENCE])).kl_base > 0


async def test_only_a_step_that_is_computed_rests() -> None:
    trained, primitives = learner()
    trained.pause_step(paused=True)
    primitives.waits = True
    step = asyncio.create_task(trained.step([SEQUENCE]))
    await primitives.passing.wait()
    trained.pause_step(paused=True)
    trained.stop_step()
    trained.pause_step(paused=True)
    with pytest.raises(StepStopped):
        await step
    assert primitives.calls == ["go on", "pause", "stop", "go on", "restore before"], "who waits for its end gets it"

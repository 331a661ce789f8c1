"""Distance between two policies, from the log-probs that they give to the same tokens."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.engines.base import (
    LearnerCapabilities,
    PassResult,
    PolicyRef,
    SpanLogprobs,
    StepLost,
    StepRefused,
    StepResult,
    StepStopped,
    StepUnsupported,
    TrainingPrimitives,
)
from openclaw_rl.types import MAX_LOG_RATIO, TrainingSequence, TrainingSettings

log = logging.getLogger(__name__)
#: How often a step is tried before a failure of the engine counts as more than a passing one.
STEP_TRIALS = 3
RETRY_PAUSE_SECONDS = 1.0
#: The distance from the base model is estimated on this many tokens of a batch, unless the loss computes it anyway.
BASE_SAMPLE_TOKENS = 2048
STOPPED = "the step was stopped"


def distance(one: SpanLogprobs, other: SpanLogprobs) -> float:
    """Distance between two policies per token. It is symmetric and never negative.

    Let r be the log-ratio of a token. Then e^r - 1 - r estimates KL(one || other) from tokens that `one` sampled, and
    e^-r - 1 + r estimates KL(other || one) from tokens that `other` sampled. Both are about r²/2 for a small move.
    Neither policy sampled an imported token. For such a token the first estimate grows without bound where an
    improbable token became likelier, and the second where a likely token became less likely. This function takes the
    smaller of the two, |r| - 1 + e^-|r|, which never grows faster than |r|: a few tokens cannot make a move look large,
    and many tokens that moved far still do.
    """
    first = flat(one)
    second = flat(other)
    if [len(span) for spans in one for span in spans] != [len(span) for spans in other for span in spans]:
        raise ValueError("the two policies were not asked about the same spans")
    if not len(first):
        return 0.0
    ratios = np.minimum(np.abs(second - first), MAX_LOG_RATIO)
    return float(np.mean(ratios - 1 + np.exp(-ratios)))


def flat(logprobs: SpanLogprobs) -> NDArray[np.float64]:
    return np.array([logprob for spans in logprobs for span in spans for logprob in span], np.float64)


def check_move(moved: float, most: float) -> None:
    """Raise StepRefused if a step moved the policy too far, or if the distance is NaN."""
    if not moved <= most:
        raise StepRefused(f"the step would move the policy by {moved:.3g} per token, more than --max-kl {most:g}")


class TransactionalLearner:
    """Implements `Learner` above the primitives of one engine.

    - A step is made whole or not at all. After StepRefused or StepUnsupported, weights, optimiser state and counters
      are bit for bit what they were before the step.
    - A step that moves the policy by more than `max_kl` per token is refused.
    - A non-finite loss or gradient never stays in the weights.
    - `undo` takes back the last step, once. There is nothing to take back after a refused step, `load` or `reset`.
    - The effect of dropout on a pass is not counted as a move of the policy.
    - A step that `stop_step` ends early leaves everything as it was before.
    - A step that is lost on the way (StepLost) is tried again from its snapshot.
    - If anything else goes wrong during a step (EngineUnavailable, a cancellation), the policy in training is dropped:
      it is never trained further from an unknown state.
    - Calls at the same time run one after the other. `close` does not wait for them.
    """

    def __init__(
        self,
        primitives: TrainingPrimitives,
        settings: TrainingSettings,
        calling: contextlib.AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        """`calling` is entered for each call, one at a time, if others use the same primitives."""
        self._primitives = primitives
        self.settings = settings
        self.retry_pause = RETRY_PAUSE_SECONDS
        self.steps = 0
        """Steps that the policy in training has made."""
        self._before: str | None = None
        """The snapshot before the last step."""
        self._calling = calling or asyncio.Lock()
        self._is_passing = self._is_stopped = False

    @property
    def capabilities(self) -> LearnerCapabilities:
        return self._primitives.capabilities

    def describe(self) -> str:
        return self._primitives.describe()

    async def start(self) -> None:
        async with self._calling:
            await self._primitives.start()

    async def close(self) -> None:
        await self._primitives.close()

    async def reset(self) -> None:
        async with self._calling:
            self.steps = 0
            self._before = None
            await self._primitives.reset()

    async def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        async with self._calling:
            self._before = None
            self._is_stopped = False
            before = await self._primitives.snapshot()
            if self._is_stopped:
                raise StepStopped(STOPPED)
            self._is_passing = True
            try:
                result = await self._step_or_restore(sequences, before)
            except (StepRefused, StepUnsupported):
                raise
            except BaseException:
                await self._primitives.close()
                raise
            finally:
                self._is_passing = False
            self._before = before
            self.steps += 1
            return result

    def stop_step(self) -> None:
        # A snapshot ends whole. The step ends after it.
        self._is_stopped = True
        if self._is_passing:
            self._primitives.stop_step()

    def pause_step(self, *, paused: bool) -> None:
        self._primitives.pause_step(paused=paused and self._is_passing and not self._is_stopped)

    async def undo(self) -> None:
        async with self._calling:
            if self._before is None:
                raise StepRefused("there is no step to take back")
            before = self._before
            self._before = None
            await self._primitives.restore(before)
            self.steps -= 1

    async def write_policy(self, folder: Path) -> PolicyRef:
        async with self._calling:
            return await self._primitives.write_policy(folder)

    async def save(self, folder: Path, *, lasting: bool = True) -> None:
        async with self._calling:
            await self._primitives.save(folder, self.steps, lasting=lasting)

    async def load(self, folder: Path) -> None:
        async with self._calling:
            self.steps = await self._primitives.load(folder)
            self._before = None

    async def _step_or_restore(self, sequences: Sequence[TrainingSequence], before: str) -> StepResult:
        """One step, tried several times if it is lost. Restores the snapshot before it raises StepRefused."""
        started = time.monotonic()
        try:
            for _ in range(STEP_TRIALS - 1):
                try:
                    return await self._try_step(sequences, started)
                except StepLost as error:
                    log.warning("%s The step is tried again.", error)
                await asyncio.sleep(self.retry_pause)
                await self._primitives.restore(before)
            try:
                return await self._try_step(sequences, started)
            except StepLost as error:
                raise error.final from error
        except (StepRefused, StepUnsupported):
            await self._primitives.restore(before)
            raise

    async def _try_step(self, sequences: Sequence[TrainingSequence], started: float) -> StepResult:
        """All passes of a step, and what they did. Raises StepRefused if the step must not stay."""
        primitives = self._primitives
        base_scoring = asyncio.create_task(self._score_base(sequences))
        base_scoring.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            before = await primitives.score(sequences) if primitives.has_dropout else None
            passes = []
            norms = []
            for _ in range(self.settings.epochs):
                result, norm = await self._pass(sequences)
                passes.append(result)
                norms.append(norm)
            before = before or passes[0].logprobs
            moved = distance(before, await primitives.score(sequences))
            check_move(moved, self.settings.max_kl)
            kl_base = self._kl_base(passes[0], before, await base_scoring)
        finally:
            base_scoring.cancel()
        last = passes[-1]
        return StepResult(
            loss=passes[0].loss,
            clip_fraction=last.clipped / max(1, last.response_tokens),
            kl_old=moved,
            kl_base=kl_base,
            grad_norm=max(norms),
            tokens=last.tokens,
            response_tokens=last.response_tokens,
            seconds=time.monotonic() - started,
            before={
                span.turn: logprobs
                for sequence, spans in zip(sequences, before, strict=True)
                for span, logprobs in zip(sequence.spans, spans, strict=True)
            },
        )

    async def _pass(self, sequences: Sequence[TrainingSequence]) -> tuple[PassResult, float]:
        """One pass and its update, with the gradient's norm. Raises StepRefused unless all of it is finite."""
        if self._is_stopped:
            raise StepStopped(STOPPED)
        # Both are submitted at once: a service may otherwise let a cycle pass between them.
        result, norm = await asyncio.gather(
            self._primitives.forward_backward(sequences), self._primitives.optim_step(), return_exceptions=True
        )
        # Without a pass there is no gradient, so the first failure is the cause of the second.
        if isinstance(result, BaseException):
            raise result
        if isinstance(norm, BaseException):
            raise norm
        for name, number in (("loss", result.loss), ("gradient", norm)):
            if not math.isfinite(number):
                raise StepRefused(f"the {name} is not finite")
        return result, norm

    async def _score_base(self, sequences: Sequence[TrainingSequence]) -> SpanLogprobs:
        """The base model's log-probs of the first sequences; none where the distance from it is known without them."""
        if self.settings.loss.kl_coef or not self.steps:
            return []
        sample: list[TrainingSequence] = []
        tokens = 0
        for sequence in sequences:
            tokens += len(sequence.ids)
            if sample and tokens > BASE_SAMPLE_TOKENS:
                break
            sample.append(sequence)
        return await self._primitives.score(sample, base=True)

    def _kl_base(self, first: PassResult, before: SpanLogprobs, base: SpanLogprobs) -> float:
        if self.settings.loss.kl_coef:
            return first.kl_base / max(1, first.response_tokens)
        return distance(base, before[: len(base)])

"""The learner on Tinker: gradients and optimiser are the service's, a step is made whole or not at all here.

Before a step the service saves its state; a step that is refused, or lost on the way, is that state loaded again. What
is written to disk are the service's paths.
"""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from openclaw_rl.engines.base import EngineAway, EngineError, EngineUnavailable, StepRefused, StepResult
from openclaw_rl.engines.measures import SpanLogprobs, check_move, distance
from openclaw_rl.engines.policy_ref import PolicyRef, WeightForm
from openclaw_rl.engines.tinker.connection import FIRST_PAUSE, Connection
from openclaw_rl.engines.tinker.datum import BadOutput, NotFinite, read_length, span_logprobs, to_data
from openclaw_rl.engines.tinker.errors import CallFailed, Kind
from openclaw_rl.engines.tinker.record import BadRecord, LearnerRecord, PolicyRecord
from openclaw_rl.engines.tinker.run import TrainingOptions, TrainingRun
from openclaw_rl.engines.tinker.sampler import TinkerSampler
from openclaw_rl.engines.tinker.surrogate import measure
from openclaw_rl.engines.tinker.weighted import (
    CROSS_ENTROPY,
    is_weighted,
    read_tables,
    sampled,
    slopes_of,
    to_weighted_data,
)
from openclaw_rl.types import BASE_VERSION, ScoreRequest, TrainingSequence

log = logging.getLogger(__name__)

#: How often a step is made before the service's failure is taken for more than a passing one.
STEP_TRIALS = 3
#: The distance from the base model is looked at on so many tokens of a batch.
BASE_SAMPLE_TOKENS = 2048


class Pass(NamedTuple):
    """One pass over a batch, with its update."""

    logprobs: SpanLogprobs
    """Of the policy before the update."""
    loss: float
    norm: float
    """Of the gradient."""


class TinkerLearner:
    """Implements `Learner`. The sampler knows the model's name, and measures the distance from the base model."""

    def __init__(self, connection: Connection, sampler: TinkerSampler, options: TrainingOptions) -> None:
        self.connection, self.sampler, self.options = connection, sampler, options
        self.run = TrainingRun(connection, options)
        self.steps = 0
        self._origin: str | None = None
        """The state before the first step: servers of one's own have few places for new training runs."""
        self._before: str | None = None
        """The state before the last step."""
        self._proven: set[bool] = set()
        """Which kinds of steps (weighted here, or not) the service has made: a refusal is then about the batch."""

    async def start(self) -> None:
        await self.connection.open()

    async def close(self) -> None:
        self.run.forget()

    async def reset(self) -> None:
        self.steps, self._before = 0, None
        if self._origin is not None:
            try:
                await self._restore(self._origin)
                return
            except EngineUnavailable as error:
                log.warning("%s A new training run begins.", error)
        await self.run.begin(self.sampler.model)

    async def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        started = time.monotonic()
        before = await self.run.saved_state()
        if not self.steps:
            self._origin = before
        weighted = is_weighted(sequences)
        proven = weighted in self._proven
        for trial in range(1, STEP_TRIALS + 1):
            try:
                result = await self._step(sequences, started)
                break
            except (StepRefused, NotFinite) as error:
                await self._restore(before)
                raise StepRefused(str(error)) from error
            except BadOutput as error:
                kind = Kind.REFUSED if weighted and not proven and trial == STEP_TRIALS else Kind.BROKEN
                failed = CallFailed(kind, "train", str(error))
                await self._recover(failed, before, proven, last=trial == STEP_TRIALS)
            except CallFailed as error:
                await self._recover(error, before, proven, last=trial == STEP_TRIALS)
        self._before = before
        self._proven.add(weighted)
        self.steps += 1
        return result

    async def undo(self) -> None:
        if self._before is None:
            raise StepRefused("there is no step to take back")
        before, self._before = self._before, None
        await self._restore(before)
        self.steps -= 1

    async def write_policy(self, folder: Path) -> PolicyRef:
        await self._write_policy(folder, lasting=False)
        return PolicyRef(WeightForm.REMOTE, folder)

    async def save(self, folder: Path) -> None:
        state = await self.run.saved_state(lasting=True)
        await self._write_policy(folder, lasting=True)
        LearnerRecord(self.steps, state).write(folder)

    async def load(self, folder: Path) -> None:
        try:
            policy, record = PolicyRecord.read(folder), LearnerRecord.read(folder)
        except BadRecord as error:
            raise StepRefused(f"the checkpoint cannot be loaded: {error}") from error
        if (policy.base_model, policy.rank) != (self.sampler.model, self.options.rank):
            raise StepRefused(
                f"the checkpoint {folder} has rank {policy.rank} on {policy.base_model}: give the same --lora-rank and "
                "--model-name, or begin anew with --resume-from-ckpt none"
            )
        self._before = None
        await self._restore(record.state)
        self.steps = record.steps

    async def _restore(self, state: str) -> None:
        await self.run.restore(state, self.sampler.model)

    async def _write_policy(self, folder: Path, *, lasting: bool) -> None:
        apart = not self.connection.traits.samples_over_training
        sampler = await self.run.saved_policy(lasting=lasting) if apart else None
        state = None if apart else await self.run.saved_state()
        PolicyRecord(self.sampler.model, self.options.rank, sampler, state).write(folder)

    async def _step(self, sequences: Sequence[TrainingSequence], started: float) -> StepResult:
        """One trial of a step. Raises CallFailed, BadOutput, NotFinite, StepRefused."""
        base = asyncio.create_task(self._base_logprobs(sequences if self.steps else ()))
        try:
            one_pass = self._weighted_pass if is_weighted(sequences) else self._pass
            passes = [await one_pass(sequences) for _ in range(self.options.training.epochs)]
            norm = max(done.norm for done in passes)
            if not math.isfinite(norm):
                raise StepRefused("the gradient is not finite")
            seen = [*(done.logprobs for done in passes), await self._look(sequences)]
            return self._result(sequences, seen, passes[0].loss, norm, await base, started)
        finally:
            base.cancel()

    async def _pass(self, sequences: Sequence[TrainingSequence]) -> Pass:
        """One update by the service's own loss."""
        data = to_data(self.connection.types, sequences, takes_means=self.connection.traits.takes_means)
        output, told = await self.run.train(data)
        logprobs = span_logprobs(sequences, output)
        return Pass(logprobs, measure(self.options.training.loss, sequences, logprobs).loss, gradient_norm(told))

    async def _weighted_pass(self, sequences: Sequence[TrainingSequence]) -> Pass:
        """One update by a loss whose slopes are computed here."""
        types, means = self.connection.types, self.connection.traits.takes_means
        output = await self.run.look(to_weighted_data(types, sequences), CROSS_ENTROPY)
        tables = read_tables(sequences, output)
        found = slopes_of(self.options.training.loss, sequences, tables)
        if math.isfinite(found.loss):
            data = to_weighted_data(types, sequences, found.tables, factor=means)
            _, told = await self.run.train(data, CROSS_ENTROPY)
            return Pass(sampled(sequences, tables), found.loss, gradient_norm(told))
        raise StepRefused("the loss is not finite")

    async def _look(self, sequences: Sequence[TrainingSequence]) -> SpanLogprobs:
        """The spans' log-probs under the policy as it is."""
        types = self.connection.types
        if is_weighted(sequences):
            output = await self.run.look(to_weighted_data(types, sequences), CROSS_ENTROPY)
            return sampled(sequences, read_tables(sequences, output))
        return span_logprobs(sequences, await self.run.look(to_data(types, sequences)))

    def _result(
        self,
        sequences: Sequence[TrainingSequence],
        seen: Sequence[SpanLogprobs],
        loss: float,
        norm: float,
        base: SpanLogprobs,
        started: float,
    ) -> StepResult:
        """What a step did, from the policy's log-probs in each pass and after the last. Raises StepRefused."""
        training = self.options.training
        last = measure(training.loss, sequences, seen[-2])
        if not math.isfinite(loss):
            raise StepRefused("the loss is not finite")
        moved = distance(seen[0], seen[-1])
        check_move(moved, training.max_kl)
        tokens = sum(span.stop - span.start for sequence in sequences for span in sequence.spans)
        return StepResult(
            loss=loss,
            clip_fraction=last.clipped / max(1, tokens),
            kl_old=moved,
            kl_base=distance(base, seen[0][: len(base)]),
            grad_norm=norm,
            tokens=sum(map(read_length, sequences)),
            response_tokens=tokens,
            seconds=time.monotonic() - started,
        )

    async def _base_logprobs(self, sequences: Sequence[TrainingSequence]) -> SpanLogprobs:
        """What the base model thinks of the first sequences; of none, if it cannot be asked."""
        found: SpanLogprobs = []
        tokens = 0
        for sequence in sequences:
            first, stop = sequence.spans[0].start, sequence.spans[-1].stop
            tokens += stop
            if found and tokens > BASE_SAMPLE_TOKENS:
                break
            try:
                scores = await self.sampler.score(ScoreRequest(sequence.ids[:stop], stop - first, BASE_VERSION))
            except EngineError as error:
                log.debug("The distance from the base model is not known: %s", error)
                break
            found.append([scores.logprobs[span.start - first : span.stop - first] for span in sequence.spans])
        return found

    async def _recover(self, error: CallFailed, before: str, proven: bool, *, last: bool) -> None:
        """Bring the state before the step back for another trial, or say why there will be none."""
        if error.kind is Kind.REFUSED:
            await self._restore(before)
            if proven:
                raise StepRefused(str(error)) from error
            # It may be the loss or a setting: batches would be set aside one after the other.
            raise EngineAway(f"{error} Another --loss-fn or --method may be what this server can do.") from error
        if last or error.kind is Kind.LOCKED:
            self.run.forget()
            raise error.as_unavailable() from error
        log.warning("%s The step is made again.", error)
        await asyncio.sleep(FIRST_PAUSE)
        await self._restore(before)


def gradient_norm(told: Any) -> float:
    """The norm of the gradient, if the service tells it; 0 if not."""
    metrics: dict[str, float] = getattr(told, "metrics", None) or {}
    found = (float(value) for name, value in metrics.items() if "grad" in name.lower() and "norm" in name.lower())
    return next(found, 0.0)

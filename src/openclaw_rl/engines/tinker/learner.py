"""The learner on Tinker: the service computes gradients and runs the optimiser.

A snapshot is a state that the service has saved. A checkpoint on disk holds the service's paths.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from openclaw_rl.engines.base import (
    EngineError,
    EngineUnavailable,
    LearnerCapabilities,
    PassResult,
    PolicyRef,
    SpanLogprobs,
    StepLost,
    StepRefused,
    StepUnsupported,
    WeightForm,
)
from openclaw_rl.engines.tinker.connection import Connection
from openclaw_rl.engines.tinker.datum import (
    CROSS_ENTROPY,
    BadOutput,
    NotFinite,
    Table,
    is_weighted,
    measure,
    read_tables,
    sampled,
    slopes_of,
    to_data,
    to_weighted_data,
)
from openclaw_rl.engines.tinker.sampler import TinkerSampler
from openclaw_rl.engines.tinker.sdk import CallFailed, Kind
from openclaw_rl.engines.tinker.training_run import (
    LINE_SECONDS,
    BadRecord,
    LearnerRecord,
    PolicyRecord,
    TrainingRun,
    TrainingRunOptions,
    paths_in,
)
from openclaw_rl.engines.transaction import TransactionalLearner
from openclaw_rl.http_client import url_without_account
from openclaw_rl.types import BASE_VERSION, ScoreRequest, TrainingSequence

log = logging.getLogger(__name__)

T = TypeVar("T")

CAPABILITIES = LearnerCapabilities(frozenset([WeightForm.REMOTE]))


class TinkerPrimitives:
    """Implements `TrainingPrimitives`. The sampler knows the model's name and scores tokens under the base model.

    - A failure that may pass is StepLost.
    - A refusal by the service is StepRefused if the service has made a step of this kind before: it is then about the
      batch. Before that it is StepUnsupported: the loss or a setting may be at fault, and batches would be set aside
      one after the other.
    """

    has_dropout = False

    def __init__(self, connection: Connection, sampler: TinkerSampler, options: TrainingRunOptions) -> None:
        self.connection = connection
        self.sampler = sampler
        self.options = options
        self.run = TrainingRun(connection, options)
        self._origin: str | None = None
        """The state before the first step: self-hosted servers have room for few training runs."""
        self._is_untrained = False
        self._submitting = asyncio.Lock()
        self._has_gradient = False
        self._weighted = False
        """Whether the last pass was weighted."""
        self._proven = connection.proven

    @property
    def capabilities(self) -> LearnerCapabilities:
        return replace(CAPABILITIES, alternatives=self.connection.traits.takes_tables)

    def describe(self) -> str:
        where = url_without_account(self.connection.account.base_url or "in the cloud")
        return f"{self.connection.traits.name}, {where}"

    async def start(self) -> None:
        await self.connection.open()

    async def close(self) -> None:
        self.run.forget()

    async def reset(self) -> None:
        if self._origin is not None:
            try:
                await self.restore(self._origin)
                return
            except EngineUnavailable as error:
                log.warning("%s A new training run begins.", error)
        await self.run.begin(self.sampler.model)
        self._is_untrained = True

    def stop_step(self) -> None:
        """The service ends what it has begun. The step stops before its next pass."""

    def pause_step(self, *, paused: bool) -> None:
        """The service computes on other machines."""

    async def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        self._weighted = is_weighted(sequences)
        run_pass = self._weighted_pass if self._weighted else self._pass
        return await self._checked(run_pass(sequences), self._weighted)

    async def optim_step(self) -> float:
        return await self._checked(self._update(), self._weighted)

    async def snapshot(self) -> str:
        state = await self.run.saved_state()
        if self._is_untrained:
            self._origin = state
            self._is_untrained = False
        return state

    async def restore(self, snapshot: str) -> None:
        await self.run.restore(snapshot, self.sampler.model)

    async def score(self, sequences: Sequence[TrainingSequence], *, base: bool = False) -> SpanLogprobs:
        if base:
            return await self._score_base(sequences)
        weighted = is_weighted(sequences)
        logprobs = await self._checked(self._forward(sequences), weighted)
        self._proven.add(weighted)
        return logprobs

    async def write_policy(self, folder: Path) -> PolicyRef:
        await self._write_policy(folder, lasting=False)
        return PolicyRef(WeightForm.REMOTE, folder)

    async def save(self, folder: Path, steps: int, *, lasting: bool = True) -> None:
        state = await self.run.saved_state(lasting=lasting)
        await self._write_policy(folder, lasting=lasting)
        LearnerRecord(steps, state).write(folder)

    async def load(self, folder: Path) -> int:
        try:
            policy = PolicyRecord.read(folder)
            record = LearnerRecord.read(folder)
        except BadRecord as error:
            raise StepRefused(f"the checkpoint cannot be loaded: {error}") from error
        if (policy.base_model, policy.rank) != (self.sampler.model, self.options.rank):
            raise StepRefused(
                f"the checkpoint {folder} has rank {policy.rank} on {policy.base_model}: give the same --lora-rank and "
                "--model-name, or start over with --resume-from-ckpt none"
            )
        await self.restore(record.state)
        self._is_untrained = record.steps == 0
        return record.steps

    async def _write_policy(self, folder: Path, *, lasting: bool) -> None:
        separate = not self.connection.traits.samples_over_training
        sampler = await self.run.saved_policy(lasting=lasting) if separate else None
        state = None if separate else await self.run.saved_state()
        PolicyRecord(self.sampler.model, self.options.rank, sampler, state).write(folder)

    async def _pass(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        """A pass with the service's own loss."""
        async with self._submitting:
            data = to_data(self.connection.types, sequences, takes_means=self.connection.traits.takes_means)
            passing = await self._submit(data)
        return self._result(sequences, read_tables(sequences, await passing))

    async def _weighted_pass(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        """A pass with a loss whose slopes are computed here, from the log-probs of a first pass."""
        types = self.connection.types
        takes_means = self.connection.traits.takes_means
        async with self._submitting:
            output = await self.run.forward(to_weighted_data(types, sequences), CROSS_ENTROPY)
            tables = read_tables(sequences, output)
            slopes = slopes_of(self.options.training.loss, sequences, tables)
            if not math.isfinite(slopes.loss):
                raise StepRefused("the loss is not finite")
            data = to_weighted_data(types, sequences, slopes.tables, factor=takes_means)
            passing = await self._submit(data, CROSS_ENTROPY)
        await passing
        return self._result(sequences, tables, slopes.loss)

    async def _submit(self, data: list[Any], loss: str | None = None) -> Awaitable[Any]:
        self._has_gradient = False
        passing = await self.run.submit_pass(data, loss)
        self._has_gradient = True
        return passing

    def _result(
        self, sequences: Sequence[TrainingSequence], tables: Sequence[Table], loss: float | None = None
    ) -> PassResult:
        """`loss` is given where it is not that of the sampled tokens alone."""
        logprobs = sampled(sequences, tables)
        measured = measure(self.options.training.loss, sequences, logprobs)
        return PassResult(
            loss=measured.loss if loss is None else loss,
            clipped=measured.clipped,
            kl_base=0.0,
            tokens=sum(sequence.read_length for sequence in sequences),
            response_tokens=sum(span.stop - span.start for sequence in sequences for span in sequence.spans),
            logprobs=logprobs,
        )

    async def _update(self) -> float:
        # The service runs both in the order of their submission; the lock keeps that order.
        async with self._submitting:
            if not self._has_gradient:
                raise StepRefused("there is no gradient to apply")
            self._has_gradient = False
            updating = await self.run.submit_update()
        return gradient_norm(await updating)

    async def _forward(self, sequences: Sequence[TrainingSequence]) -> SpanLogprobs:
        """The spans' log-probs under the current policy."""
        types = self.connection.types
        if is_weighted(sequences):
            output = await self.run.forward(to_weighted_data(types, sequences), CROSS_ENTROPY)
        else:
            output = await self.run.forward(to_data(types, sequences))
        return sampled(sequences, read_tables(sequences, output))

    async def _score_base(self, sequences: Sequence[TrainingSequence]) -> SpanLogprobs:
        """The base model's log-probs of the first sequences, until it cannot be asked."""
        logprobs: SpanLogprobs = []
        for sequence in sequences:
            first = sequence.spans[0].start
            stop = sequence.spans[-1].stop
            try:
                scores = await self.sampler.score(ScoreRequest(sequence.ids[:stop], stop - first, BASE_VERSION))
            except EngineError as error:
                log.debug("The distance from the base model is not known: %s", error)
                break
            logprobs.append([scores.logprobs[span.start - first : span.stop - first] for span in sequence.spans])
        return logprobs

    async def _checked(self, work: Awaitable[T], weighted: bool) -> T:
        """The result of a part of a step. Raises StepRefused, StepUnsupported, StepLost, EngineUnavailable."""
        try:
            return await work
        except NotFinite as error:
            raise StepRefused(str(error)) from error
        except BadOutput as error:
            failed = CallFailed(Kind.BROKEN, "train", str(error))
            unsupported = weighted and weighted not in self._proven
            raise StepLost(unsupported_step(failed) if unsupported else failed.as_unavailable()) from error
        except CallFailed as error:
            if error.kind is Kind.LOCKED:
                raise error.as_unavailable() from error
            if error.kind is not Kind.REFUSED:
                raise StepLost(error.as_unavailable()) from error
            raise (StepRefused(str(error)) if weighted in self._proven else unsupported_step(error)) from error


def unsupported_step(error: CallFailed) -> StepUnsupported:
    return StepUnsupported(f"{error} Another --loss-fn or --method may be what this server can do.")


def gradient_norm(response: Any) -> float:
    """The norm of the gradient if the service reports it, else 0."""
    metrics: dict[str, float] = getattr(response, "metrics", None) or {}
    norms = (float(value) for name, value in metrics.items() if "grad" in name.lower() and "norm" in name.lower())
    return next(norms, 0.0)


class TinkerLearner(TransactionalLearner):
    """Tinker's `Learner`: whole steps, carried out by the service, for one line or for several.

    Each line has a training run of its own, so that what happens to one leaves the others as they are.
    """

    def __init__(self, connection: Connection, sampler: TinkerSampler, options: TrainingRunOptions) -> None:
        self.primitives = TinkerPrimitives(connection, sampler, options)
        self._lines: dict[str, TinkerPrimitives] = {}
        self._lock = asyncio.Lock()
        super().__init__(self.primitives, options.training, self._lock)

    def for_line(self, line: str) -> TransactionalLearner:
        own = self.primitives
        options = replace(own.options, state_seconds=LINE_SECONDS, policy_seconds=LINE_SECONDS)
        primitives = self._lines[line] = TinkerPrimitives(own.connection, own.sampler, options)
        return TransactionalLearner(primitives, self.settings, self._lock)

    async def drop_line(self, line: str) -> None:
        """The service has no call that ends a training run: it ends with the session."""
        async with self._lock:
            if line in self._lines:
                await self._lines[line].close()

    async def erase(self, folder: Path, run_dir: Path) -> None:
        paths = await asyncio.to_thread(lambda: paths_in(folder) - paths_in(run_dir, without=folder))
        connection = self.primitives.connection
        client = connection.service.create_rest_client()

        async def delete(path: str) -> None:
            try:
                await connection.call(lambda: client.delete_checkpoint_from_tinker_path_async(path), "delete weights")
            except CallFailed as error:
                if error.kind is not Kind.LOST:
                    raise error.as_unavailable() from error

        await asyncio.gather(*map(delete, paths))

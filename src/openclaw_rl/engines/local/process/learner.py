"""The local engine's learner, seen from the server: a worker process behind the `Learner` protocol.

If the process dies, the call that it was working on fails with EngineUnavailable, and the next call starts it again,
with nothing in its memory: whoever calls must then say where to begin.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from openclaw_rl.engines.base import EngineUnavailable, StepRefused, StepResult
from openclaw_rl.engines.local.process.learner_messages import (
    Broken,
    Command,
    LearnerOptions,
    Load,
    Refused,
    Report,
    Reset,
    Save,
    Started,
    Step,
    Undo,
    WritePolicy,
)
from openclaw_rl.engines.local.process.link import Link
from openclaw_rl.engines.policy_ref import PolicyRef, policy_in
from openclaw_rl.types import TrainingSequence

log = logging.getLogger(__name__)

WORKER = "openclaw_rl.engines.local.process.learner_worker"
#: None: serving needs the core at once. On 2 cores with 4 answers being written, a step of 1,000 tokens takes 19 s
#: instead of 74, and the answers are written as fast.
SPINS = 0
DIED = "The learner's process ended while it was working; if it ran out of memory, lower --micro-batch-tokens."


class LocalLearner:
    """Implements `Learner` with one worker process."""

    def __init__(self, options: LearnerOptions, weights: Callable[[], bytes | None] = lambda: None) -> None:
        """`weights` gives the base weights as the sampler shares them at the moment, if it does."""
        self.options, self._weights = options, weights
        self.weight_bytes = 0
        self._link: Link[Command, Report] | None = None
        self._reports: AsyncIterator[Report] | None = None
        self._calling = asyncio.Lock()

    @property
    def worker_pid(self) -> int | None:
        return self._link.process.pid if self._link else None

    async def start(self) -> None:
        async with self._calling:
            await self._ready()

    async def close(self) -> None:
        if self._link is not None:
            link, self._link = self._link, None
            # A step that is under way is not worth waiting for.
            await link.close(patience=0.0)

    async def reset(self) -> None:
        await self._call(Reset())

    async def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        result = await self._call(Step(list(sequences)))
        assert result is not None
        return result

    async def undo(self) -> None:
        await self._call(Undo())

    async def write_policy(self, folder: Path) -> PolicyRef:
        await self._call(WritePolicy(folder))
        return policy_in(folder)

    async def save(self, folder: Path) -> None:
        await self._call(Save(folder))

    async def load(self, folder: Path) -> None:
        await self._call(Load(folder))

    async def _call(self, command: Command) -> StepResult | None:
        async with self._calling:
            link = await self._ready()
            link.send(command)
            try:
                report = await self._next()
            except asyncio.CancelledError:
                # Its answer would be taken for the next command's.
                await self.close()
                raise
        match report:
            case Refused(reason):
                raise StepRefused(reason)
            case Broken(reason):
                raise EngineUnavailable(reason)
        return getattr(report, "result", None)

    async def _ready(self) -> Link[Command, Report]:
        """The process, started if there is none."""
        if self._link is None:
            self._link = Link(WORKER, replace(self.options, shared=self._weights()), SPINS)
            self._reports = aiter(self._link.reports())
            report = await self._next()
            if not isinstance(report, Started):
                await self.close()
                raise EngineUnavailable(report.reason if isinstance(report, Broken) else DIED)
            self.weight_bytes = report.weight_bytes
        return self._link

    async def _next(self) -> Report:
        assert self._link is not None
        assert self._reports is not None
        try:
            return await anext(self._reports)
        except StopAsyncIteration:
            link, self._link = self._link, None
            await link.close()
            raise EngineUnavailable(f"{DIED} {link.end}".rstrip()) from None

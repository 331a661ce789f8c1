"""Trains as judged turns come in, and puts each better policy in place of the one that serves.

Exactly once: turns are claimed, a step is made, the ledger records it, and its policy serves. What a crash leaves in
between is settled at the next start from the checkpoint's own record (`lineage`). A step that cannot be served or
recorded is taken back; one that would harm the policy too, and its batch is set aside. Nothing here is waited for by a
request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from openclaw_rl.engines.base import (
    EngineAway,
    EngineError,
    EngineUnavailable,
    Learner,
    Sampler,
    StepRefused,
    StepResult,
)
from openclaw_rl.learn.batches import to_sequences
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints
from openclaw_rl.learn.errors import NoSignal
from openclaw_rl.learn.gate import Gate
from openclaw_rl.learn.lineage import Lineage
from openclaw_rl.learn.methods import Weights, lesson
from openclaw_rl.learn.policies import Policies
from openclaw_rl.learn.records import Records
from openclaw_rl.learn.reporting import Reporter, StepReport, make_report
from openclaw_rl.learn.warming import warm
from openclaw_rl.ledger.changes import UnknownTurn
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.writer import LedgerError
from openclaw_rl.types import BASE_VERSION, NextStep, StoredTurn

log = logging.getLogger(__name__)

#: After the learner was lost, it is started again after so long; each further time twice as long, at most a minute.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: So often may a batch take the learner down with it.
MAX_CRASHES_PER_BATCH = 2
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """When to train."""

    batch_size: int
    max_steps: int
    max_staleness: int
    batch_timeout: float | None
    """Train a smaller batch when the oldest sample has waited so long."""
    save_interval: int


class NotPromoted(Exception):
    """The new policy did not pass; the step has been taken back."""


class LearnLoop:
    """The way of turns from judged to applied."""

    def __init__(
        self,
        ledger: Ledger,
        learner: Learner,
        sampler: Sampler,
        weights: Weights,
        settings: LearnSettings,
        checkpoints: Checkpoints,
        policies: Policies,
        reporter: Reporter,
        gate: Gate | None = None,
        records: Records | None = None,
    ) -> None:
        self.ledger, self.learner, self.sampler = ledger, learner, sampler
        self.weights, self.settings, self.gate = weights, settings, gate
        self.line = Lineage(ledger, learner, sampler, checkpoints, policies)
        self.reporter, self.records = reporter, records
        self.trouble = ""
        """Why no step can be made at the moment, if so."""
        self._generation = 0
        self._deaths: dict[tuple[int, ...], int] = {}
        self._exam: float | None = None
        self._busy = asyncio.Lock()
        self._training = False
        self._stopping = False
        self._astray = True
        """Whether the learner may hold something else than this loop believes, so that it has to be prepared again."""
        self._pause = FIRST_PAUSE
        self._short_since: float | None = None

    @property
    def step(self) -> int:
        return self.line.step

    @property
    def version(self) -> int:
        return self.line.version

    async def begin(self, checkpoint: Checkpoint | None, *, own: bool = True) -> None:
        """Agree with a checkpoint, or with nothing, before anything is served."""
        await self.line.begin(checkpoint, own=own)

    async def run(self) -> None:
        """Learn until cancelled."""
        while True:
            try:
                async with self._busy:
                    await self._agree()
                self.trouble = ""
                await self._learn()
            except (EngineError, LedgerError, OSError) as error:
                self.trouble = str(error)
                if self._astray:
                    # What the learner holds now is nothing to make a checkpoint of.
                    self.line.unsaved.clear()
                log.error("Learning pauses for %.0f s: %s", self._pause, error)
            await asyncio.sleep(self._pause)
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)

    def progress(self) -> NextStep | None:
        """How far the next step is, if there will be one."""
        needed = self.settings.batch_size
        if self._training:
            return NextStep(self.step + 1, needed, needed, training=True)
        if self.step >= self.settings.max_steps:
            return None
        return NextStep(self.step + 1, min(needed, self.ledger.trainable()), needed)

    def status(self) -> str:
        """What the next step waits for, in words."""
        settings = self.settings
        if self.trouble:
            return f"suspended: {self.trouble}"
        if self._training:
            return f"training step {self.step + 1}"
        if self.step >= settings.max_steps:
            return f"done: --max-steps {settings.max_steps} have been made"
        waiting = self.ledger.trainable()
        return f"{waiting} of the {settings.batch_size} judged turns that a step needs (--batch-size)"

    async def finish(self) -> None:
        """Let a step that is under way end, and make a checkpoint of where learning is."""
        self._stopping = True
        async with self._busy:
            if self.line.unsaved and not self._astray:
                await self.line.save()
                log.info("What was learned up to step %d is saved: the next start goes on from it.", self.step)

    async def roll_back(self, checkpoint: Checkpoint | None) -> int:
        """Serve an earlier policy at once, and learn on from it; the number under which it serves now.

        None is the base model, which serves when a step that is under way has ended.
        """
        # A step that is under way is of the policy that is left behind.
        self._generation += 1
        served = await self.line.serve_again(checkpoint) if checkpoint else BASE_VERSION
        async with self._busy:
            self._astray, self._exam = True, None
            version = await (self.line.go_back(checkpoint, served) if checkpoint else self.line.go_back_to_base())
            self._astray = False
        log.info(
            "Policy %d serves now: %s.", version, f"that of step {self.step} again" if self.step else "the base model"
        )
        return version

    async def _agree(self) -> None:
        """Bring learner and ledger to where this loop believes them; a learner that was not lost is there already."""
        if not self._astray:
            await self.ledger.release_batches()
            return
        await self.line.prepare()
        self._astray = False

    async def _learn(self) -> None:
        with self.ledger.watch() as changed:
            while not self._astray:
                changed.clear()
                count = self._due()
                if count:
                    async with self._busy:
                        if not self._astray:
                            await self._train(count)
                    continue
                # Not wait_for, which may swallow a cancellation in Python 3.11.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._patience()):
                        await changed.wait()

    def _patience(self) -> float:
        """How long to wait for news: at most until a smaller batch is due."""
        timeout = self.settings.batch_timeout
        if timeout is None or self._short_since is None:
            return IDLE_SECONDS
        return min(IDLE_SECONDS, max(0.0, self._short_since + timeout - time.monotonic()) + 0.001)

    def _due(self) -> int:
        """How many samples to train on now; 0: wait."""
        settings, waiting = self.settings, self.ledger.trainable()
        if self.step >= settings.max_steps or not waiting or self._stopping:
            self._short_since = None
            return 0
        if waiting >= settings.batch_size:
            return settings.batch_size
        self._short_since = self._short_since or time.monotonic()
        waited = time.monotonic() - self._short_since
        return waiting if settings.batch_timeout is not None and waited >= settings.batch_timeout else 0

    async def _train(self, count: int) -> None:
        """One step, from the claim to the record."""
        self._short_since = None
        numbers = await self.ledger.claim(count, self.step, self.settings.max_staleness)
        turns = await self._with_signal(numbers)
        if len(turns) < count:
            # Some were too old or had nothing to teach: what is left waits for others.
            await self.ledger.release_batches()
            return
        self._training = True
        try:
            report = await self._make(turns)
        finally:
            self._training = False
        if report is not None:
            await self._report(turns, report)

    async def _make(self, turns: Sequence[StoredTurn]) -> StepReport | None:
        """Make a step that serves and counts; None if there is none, which the ledger then knows."""
        generation = self._generation
        try:
            result = await self._step(turns)
            if result is None:
                return None
            if generation == self._generation:
                return await self._keep(turns, result)
            await self._take_back()
        except NotPromoted as error:
            await self._quarantine(turns, str(error))
            return None
        except UnknownTurn:
            log.info("A turn was forgotten while step %d was made of it: it is taken back.", self.step + 1)
        except EngineError:
            if generation == self._generation:
                raise
            # The owner has gone back meanwhile: what could not be served is not wanted any more.
        await self.ledger.release_batches()
        return None

    async def _step(self, turns: Sequence[StoredTurn]) -> StepResult | None:
        """Let the learner make the step; None if there is none. Only what happens here is the batch's own fault."""
        try:
            sequences = await asyncio.to_thread(to_sequences, turns, self.weights)
        except NoSignal as error:
            # A step of nothing would still go on in the direction of those before it.
            log.info("Step %d is not made of these %d turns: %s.", self.step + 1, len(turns), error)
            await self._drop([turn.number for turn in turns], error)
            return None
        # Until the step counts, or is taken back.
        self._astray = True
        try:
            return await self.learner.step(sequences)
        except StepRefused as error:
            self._astray = False
            await self._quarantine(turns, str(error))
            return None
        except EngineAway:
            raise
        except EngineUnavailable:
            await self._count_death(turns)
            raise

    async def _keep(self, turns: Sequence[StoredTurn], result: StepResult) -> StepReport:
        """Serve and record the step that was made. One that cannot be is taken back."""
        try:
            report = await self._serve(turns, result)
        except (EngineError, LedgerError, OSError, NotPromoted):
            # A learner that was lost cannot; it is brought back to its checkpoint then.
            with contextlib.suppress(EngineError):
                await self._take_back()
            raise
        self._astray, self._pause = False, FIRST_PAUSE
        return report

    async def _take_back(self) -> None:
        """Let the learner forget a step that does not count."""
        await self.learner.undo()
        self._astray = False

    async def _with_signal(self, numbers: Sequence[int]) -> list[StoredTurn]:
        """The turns that the method can learn from; the others are dropped with the reason."""
        fit = []
        for number in numbers:
            try:
                turn = self.ledger.load_turn(number)
                lesson(turn, self.weights)
                fit.append(turn)
            except UnknownTurn:
                continue  # it was forgotten a moment ago
            except NoSignal as error:
                await self._drop([number], error)
        return fit

    async def _drop(self, numbers: Sequence[int], error: NoSignal) -> None:
        for number in numbers:
            await self.ledger.drop(number, f"no signal: {error}")

    async def _serve(self, turns: Sequence[StoredTurn], result: StepResult) -> StepReport:
        """Put the learner's policy in place of the one that serves, if it passes. Raises NotPromoted if not.

        It serves once the ledger has the step, so that nobody is answered by a policy that does not count.
        """
        version, policy = await self.line.write_policy()
        report = make_report(self.step + 1, version, self.version, turns, self.weights, result)
        try:
            await self.sampler.publish(version, policy, candidate=True)
            passed = await self._examine(self.gate, version) if self.gate else None
            await warm(self.ledger, self.sampler, version)
            await self.line.advance(version, [turn.number for turn in turns], asdict(report))
        except (EngineError, LedgerError, OSError, NotPromoted):
            self.sampler.retract(version)
            await asyncio.to_thread(self.line.policies.remove, version)
            raise
        self.sampler.promote(version)
        self._exam = passed
        return report

    async def _examine(self, gate: Gate, version: int) -> float:
        """Let a candidate take the examination. Raises NotPromoted if it does worse than the policy before."""
        if self._exam is None:
            self._exam = await gate.examine(self.version)
        passed = await gate.examine(version)
        if passed < self._exam - gate.margin:
            raise NotPromoted(f"the gate: {passed:.2f} of the prompts passed, {self._exam:.2f} before the step")
        return passed

    async def _report(self, turns: Sequence[StoredTurn], report: StepReport) -> None:
        """Tell of a step that counts, and make a checkpoint when it is time."""
        self.reporter.write(report)
        if self.records is not None:
            await asyncio.to_thread(self.records.write, report.step, turns, self.weights)
        interval = self.settings.save_interval
        if self.step % interval == 0 or len(self.line.unsaved) >= interval:
            try:
                await self.line.save()
            except (StepRefused, OSError) as error:
                log.error("No checkpoint could be made at step %d, the next step tries again: %s", self.step, error)
            except EngineUnavailable:
                self._astray = True
                raise

    async def _quarantine(self, turns: Sequence[StoredTurn], reason: str) -> None:
        log.error("Step %d was refused, and its %d turns are set aside: %s.", self.step + 1, len(turns), reason)
        await self.ledger.quarantine(self.step + 1, [turn.number for turn in turns], reason)

    async def _count_death(self, turns: Sequence[StoredTurn]) -> None:
        """A batch that takes the learner down again and again is set aside."""
        key = tuple(turn.number for turn in turns)
        self._deaths[key] = self._deaths.get(key, 0) + 1
        if self._deaths[key] >= MAX_CRASHES_PER_BATCH:
            await self._quarantine(turns, f"the learner's process died of it {MAX_CRASHES_PER_BATCH} times")

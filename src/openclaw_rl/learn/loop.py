"""Trains as judged turns come in, and puts each better policy in place of the one that serves.

Exactly once: turns are claimed, a step is made, its policy serves, and the ledger records it. What a crash leaves in
between is settled at the next start from the checkpoint's own record (`begin`). A step that would harm the policy is
taken back and its batch set aside. Nothing here is waited for by a request.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from openclaw_rl.engines.base import EngineError, EngineUnavailable, Learner, Sampler, StepRefused, StepResult
from openclaw_rl.learn.batches import to_sequences
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints
from openclaw_rl.learn.gate import Gate
from openclaw_rl.learn.methods import NoSignal, Weights, advantages
from openclaw_rl.learn.policies import Policies
from openclaw_rl.learn.reporting import Reporter, StepReport
from openclaw_rl.ledger.changes import UnknownTurn
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.queries import StoredTurn
from openclaw_rl.ledger.updates import Batch
from openclaw_rl.ledger.writer import LedgerError
from openclaw_rl.types import BASE_VERSION, SampleKind

log = logging.getLogger(__name__)

#: After the learner was lost, it is started again after so long; each further time twice as long, at most a minute.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: So often may a batch take the learner down with it.
DEADLY_TRIALS = 2
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


@dataclass(frozen=True, slots=True)
class NextStep:
    """What is gathered or done for the next step."""

    what: str
    done: int
    needed: int


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
    ) -> None:
        self.ledger, self.learner, self.sampler = ledger, learner, sampler
        self.weights, self.settings, self.gate = weights, settings, gate
        self.checkpoints, self.policies, self.reporter = checkpoints, policies, reporter
        self.step, self.version = 0, BASE_VERSION
        self.trouble = ""
        """Why no step can be made at the moment, if so."""
        self._unsaved: list[Batch] = []
        self._last: Checkpoint | None = None
        self._foreign: Checkpoint | None = None
        self._origin = 0
        self._latest = BASE_VERSION
        self._generation = 0
        self._deaths: dict[tuple[int, ...], int] = {}
        self._exam: float | None = None
        self._busy = asyncio.Lock()
        self._training = False
        self._stopping = False
        self._astray = False
        """Whether the learner may hold something else than this loop believes, so that it has to be prepared again."""
        self._short_since: float | None = None

    async def begin(self, checkpoint: Checkpoint | None, *, own: bool = True) -> None:
        """Agree with a checkpoint, or with nothing, before anything is served: ledger, sampler and counters.

        A checkpoint that is not this run's `own` gives its weights alone; what this run trained before stays trained.
        """
        self._last = checkpoint if own else None
        self._foreign = None if own else checkpoint
        self._origin = 0 if own else self.ledger.latest_step()
        # A policy that was gone back to has a number that the ledger may not know.
        self._latest = self._newest_saved()
        await self._agree()
        if self._last is not None:
            self.version = self._last.version
            await self.sampler.publish(self.version, self._last.folder)
        elif self._foreign is not None:
            self.version = await self._serve_checkpoint(self._foreign)

    async def run(self) -> None:
        """Learn until cancelled."""
        pause = FIRST_PAUSE
        while True:
            try:
                async with self._busy:
                    await self._prepare()
                self.trouble, pause = "", FIRST_PAUSE
                await self._learn()
            except (EngineError, LedgerError, OSError) as error:
                self.trouble = str(error)
                # What the learner holds now is nothing to make a checkpoint of.
                self._unsaved = []
                log.error("Learning pauses for %.0f s: %s", pause, error)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def progress(self) -> "NextStep":
        """How far the next step is."""
        needed = self.settings.batch_size
        if self._training:
            return NextStep(f"training step {self.step + 1}", needed, needed)
        return NextStep(f"samples for step {self.step + 1}", min(needed, self.ledger.trainable()), needed)

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
            if self._unsaved:
                await self._save()

    async def roll_back(self, checkpoint: Checkpoint) -> int:
        """Serve an earlier policy at once, and learn on from it; the number under which it serves now."""
        # A step that is under way is of the policy that is left behind.
        self._generation += 1
        version = await self._serve_checkpoint(checkpoint)
        async with self._busy:
            self._astray, self._unsaved = True, []
            await self.learner.load(checkpoint.folder)
            if self.sampler.newest_version != version:
                version = await self._serve_checkpoint(checkpoint)
            self.step, self.version = checkpoint.step, version
            self._exam = None
            # From here on a start goes on from the earlier policy, whether or not the ledger has heard of it.
            await self._save()
            await self.ledger.roll_back(checkpoint.step)
            self._astray = False
        log.info("Policy %d serves now: that of step %d again.", version, checkpoint.step)
        return version

    async def _serve_checkpoint(self, checkpoint: Checkpoint) -> int:
        version = self._new_version()
        await self.sampler.publish(version, await asyncio.to_thread(self.policies.adopt, checkpoint.folder, version))
        return version

    async def _prepare(self) -> None:
        """Bring the learner to the last checkpoint, and the ledger with it: what came after it is done again."""
        self._astray = False
        await self.learner.start()
        await self._agree()
        begun = self._last or self._foreign
        if begun is not None:
            await self.learner.load(begun.folder)
        else:
            await self.learner.reset()
        if self._last is not None:
            anew = self._last.version < self._newest_saved()
        else:
            anew = self._foreign is not None or self._origin > 0 or bool(self.checkpoints.all())
        if anew:
            # The next start goes on from here, not from what there was before this beginning.
            self.version = self._new_version()
            await self.sampler.publish(self.version, await self.policies.write(self.learner, self.version))
            await self._save()

    async def _agree(self) -> None:
        step, batches = (self._last.step, self._last.batches) if self._last else (self._origin, ())
        undone = await self.ledger.reconcile(step, batches, self._last.version if self._last else None)
        if undone:
            log.info("Steps %s are not in the checkpoint; their turns are trained on again.", undone)
        self.step, self._unsaved = step, []

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
        numbers = await self.ledger.claim(count, self.version, self.settings.max_staleness)
        turns = await self._with_signal(numbers)
        if len(turns) < count:
            # Some were too old or had nothing to teach: what is left waits for others.
            await self.ledger.release_batches()
            return
        self._training, generation = True, self._generation
        try:
            result = await self._step(turns)
            if result is None:
                return
            if generation != self._generation:
                await self.ledger.release_batches()
                return
            version = await self._serve()
        except NotPromoted as error:
            await self._quarantine(turns, str(error))
            return
        except EngineError:
            if generation == self._generation:
                raise
            # The owner has gone back meanwhile: what could not be served is not wanted any more.
            await self.ledger.release_batches()
            return
        finally:
            self._training = False
        await self._applied(turns, version, result)

    async def _step(self, turns: Sequence[StoredTurn]) -> StepResult | None:
        """Let the learner make the step; None if it refuses it. Only what happens here is the batch's own fault."""
        try:
            return await self.learner.step(await asyncio.to_thread(to_sequences, turns, self.weights))
        except StepRefused as error:
            await self._quarantine(turns, str(error))
            return None
        except EngineUnavailable:
            await self._count_death(turns)
            raise

    async def _with_signal(self, numbers: Sequence[int]) -> list[StoredTurn]:
        """The turns that the method can learn from; the others are dropped with the reason."""
        fit = []
        for number in numbers:
            try:
                turn = self.ledger.load_turn(number)
                advantages(turn, self.weights)
                fit.append(turn)
            except UnknownTurn:
                continue  # it was forgotten a moment ago
            except NoSignal as error:
                await self.ledger.drop(number, f"no signal: {error}")
        return fit

    async def _serve(self) -> int:
        """Put the learner's policy in place of the one that serves, if it passes. Raises NotPromoted if not."""
        version = self._new_version()
        folder = await self.policies.write(self.learner, version)
        if self.gate is None:
            await self.sampler.publish(version, folder)
            return version
        if self._exam is None:
            self._exam = await self.gate.examine(self.version)
        await self.sampler.publish(version, folder, candidate=True)
        passed = await self.gate.examine(version)
        if passed < self._exam - self.gate.margin:
            self.sampler.retract(version)
            await self.learner.undo()
            raise NotPromoted(f"the gate: {passed:.2f} of the prompts passed, {self._exam:.2f} before the step")
        self.sampler.promote(version)
        self._exam = passed
        return version

    def _new_version(self) -> int:
        """A number that no policy has had."""
        self._latest = max(self._latest, self.version, self.ledger.latest_version()) + 1
        return self._latest

    def _newest_saved(self) -> int:
        return max((checkpoint.version for checkpoint in self.checkpoints.all()), default=BASE_VERSION)

    async def _applied(self, turns: Sequence[StoredTurn], version: int, result: StepResult) -> None:
        report = make_report(self.step + 1, version, self.version, turns, result)
        numbers = tuple(turn.number for turn in turns)
        await self.ledger.apply_step(self.step + 1, version, numbers, asdict(report))
        self.step, self.version = self.step + 1, version
        self._unsaved.append(Batch(self.step, version, numbers))
        self.reporter.write(report)
        if self.step % self.settings.save_interval == 0 or len(self._unsaved) >= self.settings.save_interval:
            try:
                await self._save()
            except (StepRefused, OSError) as error:
                log.error("No checkpoint could be made at step %d, the next step tries again: %s", self.step, error)

    async def _save(self) -> None:
        self._last = await self.checkpoints.save(self.step, self.version, self._unsaved, self.learner.save)
        self._unsaved = []

    async def _quarantine(self, turns: Sequence[StoredTurn], reason: str) -> None:
        log.error("Step %d was refused, and its %d turns are set aside: %s.", self.step + 1, len(turns), reason)
        await self.ledger.quarantine(self.step + 1, [turn.number for turn in turns], reason)

    async def _count_death(self, turns: Sequence[StoredTurn]) -> None:
        """A batch that takes the learner down again and again is set aside."""
        key = tuple(turn.number for turn in turns)
        self._deaths[key] = self._deaths.get(key, 0) + 1
        if self._deaths[key] >= DEADLY_TRIALS:
            await self._quarantine(turns, f"the learner's process died of it {DEADLY_TRIALS} times")


def make_report(step: int, version: int, before: int, turns: Sequence[StoredTurn], result: StepResult) -> StepReport:
    kinds = [turn.sample for turn in turns]
    scores = [turn.verdict.score for turn in turns if turn.verdict and turn.verdict.score is not None]
    now = time.time()
    return StepReport(
        step=step,
        version=version,
        samples=len(turns),
        opd_rl=kinds.count(SampleKind.OPD_RL),
        opd=kinds.count(SampleKind.OPD),
        rl=kinds.count(SampleKind.RL),
        reward=fmean(scores) if scores else 0.0,
        loss=result.loss,
        kl_old=result.kl_old,
        kl_base=result.kl_base,
        clip_fraction=result.clip_fraction,
        grad_norm=result.grad_norm,
        staleness=fmean(before - turn.version for turn in turns),
        tokens=result.tokens,
        response_tokens=result.response_tokens,
        step_seconds=result.seconds,
        latency_seconds=now - max(turn.ready_at or turn.created for turn in turns),
        time=now,
    )

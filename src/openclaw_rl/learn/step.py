"""One training step: claim turns, build the batch, train, examine, publish, record."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.engines.base import (
    EngineAway,
    EngineError,
    EngineUnavailable,
    PolicyRef,
    Sampler,
    StepRefused,
    StepResult,
    StepStopped,
)
from openclaw_rl.learn.gate import Gate
from openclaw_rl.learn.guard import Guard
from openclaw_rl.learn.lineage import MAX_SHARE, Lineage
from openclaw_rl.learn.plain_answers import PlainAnswers
from openclaw_rl.learn.reporting import Records, Reporter, StepReport, make_report
from openclaw_rl.learn.samples import drop_without_signal, load_with_signal, to_sequences
from openclaw_rl.ledger import training
from openclaw_rl.ledger.errors import LedgerError, UnknownTurn
from openclaw_rl.ledger.groups import constant_since_last_step
from openclaw_rl.ledger.practices import is_practised
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import open_conversations
from openclaw_rl.methods.base import Method, NoSignal
from openclaw_rl.methods.practice import PracticeMethod
from openclaw_rl.types import Priority, SampleRequest, SamplingParams, StoredTurn

log = logging.getLogger(__name__)


class Phase(StrEnum):
    """What the learning loop does, and what the learner holds meanwhile."""

    UNPREPARED = "unprepared"
    """The learner may hold anything: it has just started, was lost, or a rollback failed."""
    WAITING = "waiting"
    """The learner holds the last step that counts. The loop waits for judged turns."""
    BATCHING = "batching"
    """Turns are claimed. The learner still holds the last step that counts."""
    TRAINING = "training"
    """The learner holds, or is making, a step that does not count yet."""
    SAVING = "saving"
    """The last step counts. It is reported, and a checkpoint is written when one is due."""
    SUSPENDED = "suspended"
    """An error stopped the last attempt. The learner holds the last step that counts, and the loop tries again."""
    EXAMINING = "examining"
    """The learner holds the last step that counts. The guard asks its policy plain prompts."""
    ROLLING_BACK = "rolling back"
    """The learner loads an earlier policy."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.UNPREPARED: frozenset({Phase.WAITING, Phase.ROLLING_BACK}),
    # WAITING and SUSPENDED lead to SAVING when the server stops.
    # They lead to UNPREPARED when the learner makes room for another line.
    Phase.WAITING: frozenset(
        {
            Phase.BATCHING,
            Phase.SAVING,
            Phase.SUSPENDED,
            Phase.EXAMINING,
            Phase.ROLLING_BACK,
            Phase.UNPREPARED,
        }
    ),
    Phase.SUSPENDED: frozenset({Phase.WAITING, Phase.SAVING, Phase.ROLLING_BACK, Phase.UNPREPARED}),
    Phase.BATCHING: frozenset({Phase.TRAINING, Phase.WAITING}),
    # A step that was refused or taken back leads to BATCHING, because its turns are still claimed.
    Phase.TRAINING: frozenset({Phase.BATCHING, Phase.SAVING, Phase.UNPREPARED}),
    Phase.SAVING: frozenset({Phase.WAITING, Phase.UNPREPARED}),
    Phase.EXAMINING: frozenset({Phase.WAITING}),
    Phase.ROLLING_BACK: frozenset({Phase.WAITING, Phase.UNPREPARED}),
}


class IllegalPhase(RuntimeError):
    """The loop was asked to enter a phase that its current phase does not lead to."""


class Phases:
    """The current phase of a loop. `enter` raises IllegalPhase for a transition that is not in the table."""

    def __init__(self) -> None:
        self.current = Phase.UNPREPARED

    def enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.current]:
            raise IllegalPhase(f"learning is {self.current} and cannot become {phase}")
        self.current = phase

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Whatever happens inside, end in WAITING if the learner holds the last step that counts, else UNPREPARED."""
        lost = False
        try:
            yield
        except EngineUnavailable:
            lost = self.current is Phase.SAVING
            raise
        finally:
            lost = lost or self.current is Phase.TRAINING
            self.enter(Phase.UNPREPARED if lost else Phase.WAITING)


@dataclass(frozen=True, slots=True)
class LearnSettings:
    """When to train and when to save."""

    batch_size: int
    max_steps: int
    max_staleness: int
    batch_timeout: float | None
    """Train on a smaller batch after it has waited this many seconds."""
    save_interval: int
    """Steps between checkpoints that are kept."""
    recovery_share: float = MAX_SHARE
    """The share of the training time that saving for recovery may take."""
    first_pause: float = 1.0
    """Seconds before the first retry after an error. Each further pause is twice as long, up to the longest."""
    longest_pause: float = 60.0
    idle_seconds: float = 5.0
    """The loop looks for turns at least this often, even if the ledger reports no change."""


#: A batch is set aside after this many learner crashes.
MAX_CRASHES_PER_BATCH = 2
#: How many conversations are warmed, and how many tokens in all: a few seconds of work on a CPU.
MAX_CONVERSATIONS = 8
MAX_TOKENS = 4096


class NotPromoted(Exception):
    """The new policy failed the gate."""


class StepRunner:
    """Makes training steps, one at a time.

    Guarantees:
    - A step counts once the ledger has recorded it. Its policy serves only from then on.
    - A step that was lost is made again on the same turns and under the same version. A later policy that serves is
      not replaced by an earlier one.
    - A step that cannot be published or recorded is taken back, and its turns are released.
    - A batch is quarantined if the learner refuses it, if its policy fails the gate, or if the learner crashes on it
      MAX_CRASHES_PER_BATCH times. Failures of the sampler, the ledger or the disk never quarantine a batch.
    - Turns without a signal are dropped with the reason.
    - A step that a rollback overtakes, or that is stopped, is taken back. Its turns can be trained on again.
    - The phase is TRAINING exactly while the learner may hold a step that does not count.
    """

    def __init__(
        self,
        line: Lineage,
        method: Method,
        max_staleness: int,
        reporter: Reporter,
        gate: Gate | None,
        records: Records | None,
        phases: Phases,
        guard: Guard | None = None,
    ) -> None:
        self.line = line
        self.from_feedback = method
        self.practice = PracticeMethod(method.options)
        self.method: Method = method
        """That of the step that is being made."""
        self.is_practising = False
        """Whether that step is one on practised answers."""
        self.max_staleness = max_staleness
        self.reporter = reporter
        self.gate = gate
        self.records = records
        self.phases = phases
        self.guard = guard
        self.ledger = line.ledger
        self.learner = line.learner
        self.sampler = line.sampler
        self._crashes: dict[tuple[int, ...], int] = {}
        self.gate_score: float | None = None
        """The gate's score of the policy that serves; None if it has not been examined."""
        self._abandoned = False

    def abandon(self, *, abandoned: bool = True) -> None:
        """Take back the step that is being made, because a rollback was requested; or keep it, because it failed."""
        self._abandoned = abandoned

    async def run(self, count: int, practised: Sequence[int] = ()) -> bool:
        """Make a step from at least `count` turns; whether there is one that counts. The phase must be BATCHING.

        There can be more, because groups are taken as a whole. A lost step is made from exactly its turns, and so is
        one on answers that are `practised`.
        """
        self._abandoned = False
        lost = self.line.lost[0] if self.line.lost else None
        if lost is not None or practised:
            numbers = await self.ledger.write(training.claim_turns, lost.turns if lost else practised)
        else:
            needs_good = self.guard is not None and self.guard.is_cautious
            rules = (count, self.line.step, self.max_staleness, needs_good, self.line.takes)
            numbers = await self.ledger.write(training.claim, *rules)
        self.is_practising = self.ledger.read(is_practised, numbers)
        self.method = self.practice if self.is_practising else self.from_feedback
        turns = await load_with_signal(self.ledger, self.method, numbers)
        # If some turns were stale or had no signal, the others wait for a full batch.
        report = await self._try(turns) if len(turns) >= count else None
        if report is None:
            await self.ledger.write(training.release_batches, self.line.takes)
            if lost is not None and not self._abandoned:
                self.line.skip_lost()
            return False
        self.phases.enter(Phase.SAVING)
        self.reporter.write(report)
        if self.records is not None:
            await asyncio.to_thread(self.records.write, report.step, turns, self.method)
        return True

    async def _try(self, turns: Sequence[StoredTurn]) -> StepReport | None:
        """Make a step of these turns; None if there is none that counts. Failures of an engine are raised."""
        try:
            return await self._make(turns)
        except NotPromoted as error:
            await self._quarantine(turns, str(error))
        except UnknownTurn:
            log.info("Step %d is taken back: one of its turns was deleted meanwhile.", self.line.step + 1)
        except EngineError:
            if not self._abandoned:
                raise
        return None

    async def _make(self, turns: Sequence[StoredTurn]) -> StepReport | None:
        """Train and keep the step; None if no step was kept."""
        result = await self._train(turns)
        if result is None:
            return None
        if self._abandoned:
            await self._take_back()
            return None
        try:
            return await self._publish(turns, result)
        except (EngineError, LedgerError, OSError, NotPromoted):
            # A learner that crashed cannot take the step back. It is prepared again later.
            with contextlib.suppress(EngineError):
                await self._take_back()
            raise

    async def _train(self, turns: Sequence[StoredTurn]) -> StepResult | None:
        """Let the learner make the step; None if it refuses. Only errors here are blamed on the batch."""
        try:
            sequences = await asyncio.to_thread(to_sequences, turns, self.method)
        except NoSignal as error:
            # With a zero gradient the optimiser would still follow its momentum.
            log.info("Step %d is not made from these %d turns: %s.", self.line.step + 1, len(turns), error)
            for turn in turns:
                await drop_without_signal(self.ledger, turn.number, error)
            return None
        self.phases.enter(Phase.TRAINING)
        try:
            return await self.learner.step(sequences)
        except StepStopped:
            self.phases.enter(Phase.BATCHING)
            self._abandoned = True
            return None
        except StepRefused as error:
            self.phases.enter(Phase.BATCHING)
            await self._quarantine(turns, str(error))
            return None
        except EngineAway:
            raise
        except EngineUnavailable:
            await self._count_crash(turns)
            raise

    async def _publish(self, turns: Sequence[StoredTurn], result: StepResult) -> StepReport:
        """Record the step and let its policy serve, unless it serves already or a later one does."""
        version = self.line.repeated_version()
        if version is None:
            version, policy = await self.line.write_policy()
            served = await self.line.find_served(version, policy)
            if served is None:
                return await self._publish_new(version, policy, turns, result)
            version = served
        report = self._report(version, turns, result)
        await self.line.advance(version, [turn.number for turn in turns], report.as_json())
        return report

    def _report(self, version: int, turns: Sequence[StoredTurn], result: StepResult) -> StepReport:
        constant_groups = self.ledger.read(constant_since_last_step)
        step = self.line.step + 1
        before = self.line.version
        of_guard = self.guard.numbers if self.guard else None
        made_from = None if self.line.takes is None else self.ledger.read(training.policy_line, before)
        return make_report(step, version, before, turns, self.method, result, constant_groups, of_guard, made_from)

    async def _publish_new(
        self, version: int, policy: PolicyRef, turns: Sequence[StoredTurn], result: StepResult
    ) -> StepReport:
        """Record the step and let its policy serve. Raises NotPromoted if the policy fails the gate."""
        try:
            await self.sampler.publish(version, policy, candidate=True)
            score = await self.examine(version)
            await warm(self.ledger, self.sampler, version, self.line.options.owner)
            # Now, so that its latency includes all of this.
            report = self._report(version, turns, result)
            await self.line.advance(version, [turn.number for turn in turns], report.as_json())
        except (EngineError, LedgerError, OSError, NotPromoted):
            self.sampler.retract(version)
            await asyncio.to_thread(self.line.policies.remove, version)
            raise
        # Promotion comes after the record, so that no policy serves whose step does not count.
        self.sampler.promote(version)
        self.gate_score = score
        return report

    async def examine(self, version: int) -> float | None:
        """The score of a candidate; None without a gate.

        Raises NotPromoted if it is below the serving policy's by more than the margin.
        """
        gate = self.gate
        if gate is None:
            return None
        if self.gate_score is None:
            self.gate_score = await gate.examine(self.sampler.newest_version)
        score = await gate.examine(version)
        if score < self.gate_score - gate.margin:
            raise NotPromoted(f"the gate: {score:.2f} of the prompts passed, {self.gate_score:.2f} before it")
        return score

    async def compare(self, version: int) -> tuple[PlainAnswers, str]:
        """Why gate or guard would not let a candidate serve, empty if they would; and how it answers."""
        try:
            await self.examine(version)
        except NotPromoted as error:
            return PlainAnswers(version), str(error)
        return await self.guard.examine(version) if self.guard else (PlainAnswers(version), "")

    async def _take_back(self) -> None:
        """Let the learner undo a step that does not count."""
        await self.learner.undo()
        self.phases.enter(Phase.BATCHING)

    async def _quarantine(self, turns: Sequence[StoredTurn], reason: str) -> None:
        step = self.line.step + 1
        log.error("Step %d was refused, and its %d turns are set aside: %s.", step, len(turns), reason)
        numbers = [turn.number for turn in turns]
        await self.ledger.write(training.quarantine, step, numbers, reason, self.line.name)

    async def _count_crash(self, turns: Sequence[StoredTurn]) -> None:
        """Quarantine a batch on which the learner crashes again and again."""
        batch = tuple(turn.number for turn in turns)
        self._crashes[batch] = self._crashes.get(batch, 0) + 1
        if self._crashes[batch] >= MAX_CRASHES_PER_BATCH:
            await self._quarantine(turns, f"the learner's process died of it {MAX_CRASHES_PER_BATCH} times")


async def warm(ledger: Ledger, sampler: Sampler, version: int, owner: str | None = None) -> None:
    """Prefill the latest conversations, or those of an owner, as background work.

    Those that are too long or that fail are skipped.

    Cached prefixes belong to one policy version and one owner. Without this, the first request of every conversation
    after a swap would be prefilled from its beginning.
    """
    left = min(MAX_TOKENS, sampler.limits.max_context_tokens - 1)
    for turn, whose in ledger.read(open_conversations, MAX_CONVERSATIONS, owner):
        tokens = ledger.sequence(turn)
        if len(tokens) > left:
            continue
        left -= len(tokens)
        params = SamplingParams(max_tokens=1)
        request = SampleRequest(tokens, params, version=version, priority=Priority.BACKGROUND, owner=whose)
        with contextlib.suppress(EngineError):
            async for _ in sampler.sample(request):
                pass

"""Trains while judged turns come in, and replaces the policy that serves with each better one."""

import asyncio
import logging
import time
from collections.abc import Callable

from openclaw_rl.aio import Stoppable, wait_at_most
from openclaw_rl.engines.base import EngineError, Learner, Sampler, StepRefused
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints, Policies
from openclaw_rl.learn.gate import Gate
from openclaw_rl.learn.guard import Guard
from openclaw_rl.learn.lineage import Budget, Lineage, LineOptions
from openclaw_rl.learn.plain_answers import PlainAnswers
from openclaw_rl.learn.reporting import Records, Reporter
from openclaw_rl.learn.rollback import find_traces, newest_until, newest_without, remove
from openclaw_rl.learn.step import LearnSettings, Phase, Phases, StepRunner
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.groups import first_good, trainable
from openclaw_rl.ledger.practices import to_train
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import blame, policy_line, release_batches, take_up_again, versions_with_deleted_turns
from openclaw_rl.methods.base import Method
from openclaw_rl.types import BASE_VERSION, NextStep

log = logging.getLogger(__name__)


class LearnLoop:
    """Trains on judged turns and publishes each new policy.

    Guarantees:
    - Each turn is trained on once. A step that is lost in a crash is made again, on the same turns; `Lineage` settles
      at the next start which steps the last saved state holds. The policy that served last serves meanwhile.
    - The learner's state is saved as often as its `Budget` allows, whatever the interval of kept checkpoints.
    - Learner, sampler, ledger and checkpoints agree in the phase WAITING. It changes as `step.TRANSITIONS` allows.
    - No request waits for a step or a swap.
    - After an error the loop tries again by itself, with growing pauses; `status` gives the reason meanwhile.
    - A policy that the guard finds worse is replaced by the last good one, and the turns since are set aside. No step
      is made while it examines. A rollback and the stop of the server do not wait for it.
    - A rollback serves the earlier policy at once. A step that runs meanwhile is taken back. If the rollback fails, the
      policy that served before serves again.
    - `finish` lets the running step end, starts no other, and saves only a policy that counts.
    """

    def __init__(
        self,
        ledger: Ledger,
        learner: Learner,
        sampler: Sampler,
        method: Method,
        settings: LearnSettings,
        checkpoints: Checkpoints,
        policies: Policies,
        reporter: Reporter,
        gate: Gate | None = None,
        records: Records | None = None,
        guard: Guard | None = None,
        line: LineOptions | None = None,
        lock: asyncio.Lock | None = None,
    ) -> None:
        """`lock` is that of all lines which use the same learner, so that one of them has it at a time."""
        self.ledger = ledger
        self.settings = settings
        self.line = Lineage(ledger, learner, sampler, checkpoints, policies, line)
        self.phases = Phases()
        self.guard = guard
        self.steps = StepRunner(self.line, method, settings.max_staleness, reporter, gate, records, self.phases, guard)
        self.may_practise: Callable[[], bool] = lambda: True
        """Whether a step on practised answers may begin now."""
        self.others_wait: Callable[[], bool] = lambda: False
        """Whether a step of another line is due from feedback."""
        self.examines_later = False
        """Whether a practice is under way, which lets the guard examine at its end."""
        self.rests = 0
        """How many averages are being examined, during which no step is made and the guard examines nothing else."""
        self.trouble = ""
        """Why no step can be made at the moment; empty if one can."""
        self.lock = lock or asyncio.Lock()
        """Held in every phase but UNPREPARED, WAITING and SUSPENDED."""
        self._stopping = self._has_left = False
        self._pause = settings.first_pause
        self._small_batch_since: float | None = None
        self._accepts_small_batches = False
        self._changed: asyncio.Event | None = None
        self._recovery = Budget(settings.recovery_share)
        self._examination = Stoppable[tuple[PlainAnswers, str]]()
        if guard is not None and guard.state.good is not None:
            checkpoints.good = guard.state.good.version

    @property
    def phase(self) -> Phase:
        return self.phases.current

    @property
    def step(self) -> int:
        return self.line.step

    @property
    def version(self) -> int:
        return self.line.version

    @property
    def is_waiting(self) -> bool:
        """Whether no step is being made and none is due from feedback. A line of several may be out of the learner."""
        is_parked = self.phase is Phase.UNPREPARED and self.line.takes is not None
        return (self.phase is Phase.WAITING or is_parked) and not self.lock.locked() and not self._due()

    def is_due(self, turns: int, practised: int) -> bool:
        """Whether an examination or a step is due, if so many turns and practised answers wait."""
        return self.is_examination_due() or bool(self._due(turns) or (practised and self._practice_due()))

    async def run(self) -> None:
        """Learn until cancelled."""
        while True:
            try:
                await self.prepare()
                # It returns when a rollback or a save has begun, whose end is awaited where the lock is.
                await self._learn()
            except (EngineError, LedgerError, OSError) as error:
                await asyncio.sleep(self.suspend(error))

    async def prepare(self) -> bool:
        """Let learner and ledger hold the last step that counts, unless the line was left; whether they do. Raises
        EngineError, LedgerError and OSError."""
        async with self.lock:
            if self._has_left:
                return False
            if self.phase is Phase.UNPREPARED:
                await self.line.prepare()
            else:
                await self.ledger.write(release_batches, self.line.takes)
            if self.phase is not Phase.WAITING:
                self.phases.enter(Phase.WAITING)
        self.trouble = ""
        return True

    def suspend(self, error: Exception) -> float:
        """After an error: note why no step can be made; for how many seconds none should be tried."""
        self.trouble = str(error)
        if self.phase is Phase.UNPREPARED:
            # The learner no longer holds these steps, so no checkpoint can be made of them.
            self.line.unsaved.clear()
        elif self.phase is Phase.WAITING:
            self.phases.enter(Phase.SUSPENDED)
        pause, self._pause = self._pause, min(self.settings.longest_pause, 2 * self._pause)
        log.error("Learning pauses for %.0f s: %s", pause, error)
        return pause

    async def leave(self) -> None:
        """Take back the step that is being made, and make no other: the line is being deleted."""
        self._stopping = self._has_left = True
        self._examination.stop()
        self.steps.abandon()
        if self.phase is Phase.TRAINING:
            self.stop_step()
        async with self.lock:
            if self.phase is not Phase.UNPREPARED:
                self.phases.enter(Phase.UNPREPARED)

    async def park(self) -> None:
        """Save what the next start would not continue from, because the learner is about to forget this line."""
        async with self.lock:
            if self.phase is Phase.UNPREPARED:
                return
            if not self.line.is_saved:
                self.phases.enter(Phase.SAVING)
                with self.phases.resting():
                    await self.line.save(kept=False)
            self.phases.enter(Phase.UNPREPARED)

    def progress(self) -> NextStep | None:
        """How many turns the next step has; None after the last step."""
        needed = self.settings.batch_size
        if self.phase is Phase.TRAINING:
            return NextStep(self.step + 1, needed, needed, training=True)
        if self.step >= self.settings.max_steps:
            return None
        return NextStep(self.step + 1, self.ledger.read(trainable, self.line.takes), needed)

    def status(self) -> str:
        """What the next step waits for, in words."""
        most, needed = self.settings.max_steps, self.settings.batch_size
        if self.trouble:
            return f"suspended: {self.trouble}"
        if self.phase is Phase.TRAINING:
            return f"training step {self.step + 1}"
        if self.step >= most:
            return f"done: --max-steps {most} have been made"
        if self.phase is Phase.UNPREPARED:
            return "preparing: it loads the weights to continue from"
        waiting = self.ledger.read(trainable, self.line.takes)
        if self.waits_for_good_score:
            return f"{waiting} judged turns, and needs one with a good score among them, because the guard went back"
        if waiting > needed:
            return f"all {needed} judged turns that a step needs (--batch-size), and {waiting - needed} more"
        return f"{waiting} of the {needed} judged turns that a step needs (--batch-size)"

    @property
    def waits_for_good_score(self) -> bool:
        """Whether no step is made because the guard went back, and no turn since has a good score."""
        is_cautious = self.guard is not None and self.guard.is_cautious
        return is_cautious and self.ledger.read(first_good, self.line.takes) is None

    def accept_small_batches(self, accept: bool) -> None:
        """Train, or no longer train, on fewer turns than a batch at once, because no further ones come."""
        self._accepts_small_batches = accept
        if accept and self._changed is not None:
            self._changed.set()

    def stop_step(self) -> None:
        """Take back the step that is being made, so that `finish` need not wait for its end."""
        self.steps.learner.stop_step()

    def stop_practice(self) -> None:
        """Take back the step on practised answers that is being made, unless it is a lost one that is made again."""
        if self._is_practising:
            self.stop_step()

    def pause_practice(self, *, paused: bool) -> None:
        """Let the step on practised answers rest, or go on. It is taken back if a line has a step from feedback due."""
        if self._is_practising and (self._due() or self.others_wait()):
            self.stop_step()
        else:
            self.steps.learner.pause_step(paused=paused and self._is_practising)

    @property
    def _is_practising(self) -> bool:
        return self.phase is Phase.TRAINING and self.steps.is_practising and not self.line.lost

    async def finish(self) -> None:
        """Let the running step end, start no other, and save what no checkpoint holds yet."""
        self._stopping = True
        self._examination.stop()
        self.stop_practice()
        if await self.save():
            log.info("Saved the policy of step %d. The next start continues from it.", self.step)

    async def save(self) -> bool:
        """Write a checkpoint of the steps that none holds yet, once the running step has ended; whether it did."""
        if self.phase is not Phase.UNPREPARED or self.line.unsaved:  # a learner that starts holds the lock for seconds
            async with self.lock:
                if self.line.unsaved and self.phase is not Phase.UNPREPARED:
                    self.phases.enter(Phase.SAVING)
                    with self.phases.resting():
                        await self.line.save()
                    return True
        return False

    async def roll_back(self, checkpoint: Checkpoint | None, *, retrain: bool = False) -> int:
        """Serve an earlier policy at once and continue learning from it; the version under which it serves now.

        None is the base model. It serves once the running step has ended. With `retrain`, the turns of later steps are
        trained on again.
        """
        self._examination.stop()
        self.steps.abandon()
        self.stop_practice()
        try:
            served = await self.line.begin_to_go_back(checkpoint) if checkpoint else BASE_VERSION
        except BaseException:
            # The running step counts again, and so does an error that ends it.
            self.steps.abandon(abandoned=False)
            raise
        # Another step or examination may have begun meanwhile.
        self.steps.abandon()
        self._examination.stop()
        try:
            async with self.lock:
                version = await self.go_back(checkpoint, served, retrain=retrain)
        except BaseException:
            self.line.take_back()
            raise
        source = f"the policy of step {self.step}" if self.step else "the base model"
        log.info("Rolled back: policy %d serves now, which is %s.", version, source)
        return version

    async def go_back(self, checkpoint: Checkpoint | None, served: int, *, retrain: bool) -> int:
        """Continue from an earlier policy that serves already, or from the base model; the version that serves.

        The caller holds the lock.
        """
        self.phases.enter(Phase.ROLLING_BACK)
        self._examination.stop()
        self.steps.gate_score = None
        after = Phase.UNPREPARED
        try:
            if checkpoint:
                version = await self.line.go_back(checkpoint, served, retrain=retrain)
            else:
                version = await self.line.go_back_to_base(retrain=retrain)
            try:
                await self.line.leave_line(retrain=retrain)
                after = Phase.WAITING
            except LedgerError as error:
                log.warning("The ledger learns of the rollback once it can be written: %s", error)
        finally:
            self.phases.enter(after)
            if self._changed is not None:
                self._changed.set()
        return version

    async def hold(self, checkpoint: Checkpoint) -> int:
        """Load a checkpoint's policy for those who name it, beside the one that serves; under which version.

        It waits for the running step, whose policy must get the next number.
        """
        self._examination.stop()
        self.stop_practice()
        async with self.lock:
            return await self.line.hold(checkpoint)

    async def find_fault(self, version: int) -> str | None:
        """Why gate or guard would not let a policy serve that is on hold; empty if they would, None if stopped.

        Other lines learn meanwhile. This one has to rest.
        """
        examined = None if self._stopping else await self._examination.run(self.steps.compare(version))
        return None if examined is None else examined[1]

    async def examine(self, *, leaves_worse: bool = True) -> bool:
        """Whether the guard finds the policy that serves no worse, whenever it looked last, or if it cannot look.

        If it is worse, the last good one replaces it, unless `leaves_worse` is false.
        """
        async with self.lock:
            guard = self.guard if self.phase is Phase.WAITING else None
            return guard is None or await self._examine(guard, leaves_worse)

    async def take_back(self, since: int, why: str) -> bool:
        """Let the last good policy serve again if it is `since` or made of it, and set turns aside; whether it does."""
        async with self.lock:
            guard = self.guard
            if guard is None or not since <= guard.last_good < self.version or self.phase is not Phase.WAITING:
                return False
            guard.refuse(PlainAnswers(self.version), why)
            await self._leave_worse(guard, cautious=False)
            return True

    async def _examine(self, guard: Guard, leaves_worse: bool) -> bool:
        """Do what `examine` says; the phase must be WAITING."""
        guard.left_line(self.ledger.read(policy_line, self.version))
        if not guard.is_worse(self.version):
            self.phases.enter(Phase.EXAMINING)
            try:
                examined = await self._examination.run(guard.examine(self.version, brief=not leaves_worse))
            except EngineError as error:
                log.warning("The guard could not examine policy %d, and tries again: %s", self.version, error)
                return True
            finally:
                self.phases.enter(Phase.WAITING)
            if examined is None:
                return True
            policy, why = examined
            if not why:
                await self._keep_good(guard, policy)
                return True
            if leaves_worse:
                guard.refuse(policy, why)
        if leaves_worse:
            await self._leave_worse(guard)
        return False

    async def _keep_good(self, guard: Guard, policy: PlainAnswers) -> None:
        """Remember the policy as the last good one, with a checkpoint of it."""
        if self.line.unsaved:
            self.phases.enter(Phase.SAVING)
            with self.phases.resting():
                try:
                    await self.line.save(for_guard=True)
                except (StepRefused, OSError) as error:
                    log.error("Policy %d is good, but it was not saved: %s", self.version, error)
                    return
        self.line.checkpoints.good = self.version
        guard.accept(policy)

    async def _leave_worse(self, guard: Guard, *, cautious: bool = True) -> None:
        """Continue from the last good policy, cautiously or as before, and set the turns of the steps since aside."""
        last = guard.last_good
        made_from = self.ledger.read(policy_line, self.version)
        saved = self.line.checkpoints.all()
        later, checkpoint = await asyncio.to_thread(newest_until, last, saved, made_from, has_steps=self.step > 0)
        left, step, why = self.version, checkpoint.step if checkpoint else 0, guard.state.worse
        turns = await self.ledger.write(blame, later, why, self.line.name)
        try:
            served = await self.line.begin_to_go_back(checkpoint) if checkpoint else BASE_VERSION
            version = await self.go_back(checkpoint, served, retrain=False)
        except BaseException:
            self.line.take_back()
            raise
        to_good = last in (checkpoint.versions if checkpoint else (BASE_VERSION,))
        guard.went_back(version, to_good=to_good, cautious=cautious)
        self.line.checkpoints.good = version
        log.warning(
            "Policy %d is worse, so the policy of step %d serves again, as %d. %d turns are set aside: %s. "
            "openclaw-rl relearn learns from them all the same.%s",
            *(left, step, version, turns, why, " Steps now need a good score among theirs." if cautious else ""),
        )

    async def relearn(self) -> int:
        """Let the turns that the guard set aside be trained on all the same; how many there are."""
        if self.guard is not None:
            self.guard.dare()
        return await self.ledger.write(take_up_again, self.line.name)

    async def retrain(self) -> int:
        """Learn again without deleted turns: serve the newest policy without them, and delete those with them.

        Returns the version that serves. The other turns of later steps are trained on again.
        """
        self._examination.stop()
        while True:
            versions = self.ledger.read(versions_with_deleted_turns, self.line.takes)
            if self.line.made & versions:
                line = self.ledger.read(policy_line, self.version)
                clean = await asyncio.to_thread(newest_without, versions, self.line.checkpoints.all(), line)
                await self.roll_back(clean, retrain=True)
            async with self.lock:
                versions = self.ledger.read(versions_with_deleted_turns, self.line.takes)
                # An average may have been adopted while this waited.
                if not self.line.made & versions:
                    for version in versions:
                        self.line.sampler.retract(version)
                    traces = find_traces(versions, self.line.checkpoints, self.line.policies)
                    await asyncio.to_thread(remove, traces, self.line.checkpoints, self.line.policies)
                    return self.line.sampler.newest_version

    async def _learn(self) -> None:
        """Make steps until the phase is no longer WAITING."""
        with self.ledger.watch() as changed:
            self._changed = changed
            while self.phase is Phase.WAITING:
                changed.clear()
                if not await self.take_turn():
                    await wait_at_most(self.patience(), changed.wait())

    async def take_turn(self) -> bool:
        """Examine or make a step, if that is due; whether it was. The phase must be WAITING."""
        if self.is_examination_due():
            await self.examine()
            return True
        count = self._due()
        practised = [] if count else self._practice_due()
        if not count and not practised:
            return False
        async with self.lock:
            if self.phase is Phase.WAITING:
                await self._train(count, practised)
        return True

    def patience(self) -> float:
        """How many seconds to wait for a change: at most until a smaller batch is due."""
        idle = self.settings.idle_seconds
        timeout = self.settings.batch_timeout
        if timeout is None or self._small_batch_since is None:
            return idle
        return min(idle, max(0.0, self._small_batch_since + timeout - time.monotonic()) + 0.001)

    def is_examination_due(self) -> bool:
        """Whether the guard should examine now. Lost steps are made again first."""
        if self.guard is None or self.line.lost or self._stopping or self.rests or self.examines_later:
            return False
        return self.guard.is_due(self.version)

    def _due(self, waiting: int | None = None) -> int:
        """How many turns to train on now; 0 means wait. `waiting`: how many there are, if that is known."""
        settings, lost, takes = self.settings, self.line.lost, self.line.takes
        waiting = self.ledger.read(trainable, takes) if waiting is None else waiting
        waiting += len(self.ledger.read(to_train, takes)) if lost else 0
        if self.step >= settings.max_steps or not waiting or self._stopping or self.rests:
            self._small_batch_since = None
            return 0
        if lost:
            return len(lost[0].turns)
        if self.waits_for_good_score:
            return 0
        if waiting >= settings.batch_size:
            return settings.batch_size
        self._small_batch_since = self._small_batch_since or time.monotonic()
        waited = time.monotonic() - self._small_batch_since
        overdue = settings.batch_timeout is not None and waited >= settings.batch_timeout
        return waiting if overdue or self._accepts_small_batches else 0

    def _practice_due(self) -> list[int]:
        """The practised answers to train on now. Steps from feedback and people who use the sampler go first."""
        if self.step >= self.settings.max_steps or self._stopping or self.rests or not self.may_practise():
            return []
        return self.ledger.read(to_train, self.line.takes)

    async def _train(self, count: int, practised: list[int]) -> None:
        """Make one step from feedback, or else on practised answers, and save if that is due."""
        self._small_batch_since = None
        self.phases.enter(Phase.BATCHING)
        with self.phases.resting():
            started = time.monotonic()
            if not await self.steps.run(count, practised):
                return
            self._pause = self.settings.first_pause
            self._recovery.add_time(time.monotonic() - started)
            await self.line.save_if_due(self.settings.save_interval, self._recovery)

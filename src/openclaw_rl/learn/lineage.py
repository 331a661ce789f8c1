"""Keeps learner, sampler, checkpoints and ledger at the same step and policy version."""

import asyncio
import filecmp
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import EngineUnavailable, Learner, PolicyRef, Sampler, StepRefused, policy_in
from openclaw_rl.learn.checkpoints import RECORD, Checkpoint, Checkpoints, Policies, remove_unfinished
from openclaw_rl.ledger import training
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.types import BASE_VERSION, SHARED, Batch

log = logging.getLogger(__name__)

#: The share of the time that something may take which is done beside learning.
MAX_SHARE = 0.05


class Budget:
    """Decides whether something is due that may take at most `share` of the time.

    - It is due when that share of the time since the last occasion exceeds what the last occasion took. The first one,
      whose cost is not known, is due at once.
    - So what is not done yet goes back at most 1 / `share` times as long as one occasion takes.
    """

    def __init__(self, share: float = MAX_SHARE) -> None:
        self.share = share
        self.seen = time.monotonic()
        """Up to when time was counted, for those who count all of it."""
        self._passed = self._cost = 0.0

    @property
    def is_due(self) -> bool:
        return self._passed * self.share > self._cost

    def add_time(self, seconds: float) -> None:
        """So much time has passed that counts."""
        self._passed += seconds

    def add_cost(self, seconds: float) -> None:
        """It was done, and took this long."""
        self._passed = 0.0
        self._cost = seconds


class VersionNumbers:
    """Numbers for new policies. All lines of a run have theirs from one place, so none is used twice."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.latest = BASE_VERSION

    def next(self) -> int:
        """A version number that no policy has had."""
        self.latest = max(self.latest, self.ledger.read(training.latest_version)) + 1
        return self.latest

    def know(self, version: int) -> None:
        """A policy on disk has this number, whether or not the ledger knows of it."""
        self.latest = max(self.latest, version)

    def give_back(self, version: int) -> None:
        """The last number was not needed."""
        self.latest -= self.latest == version


@dataclass(frozen=True, slots=True)
class LineOptions:
    """Which line it is, and which turns teach it."""

    name: str = SHARED
    takes: str | None = None
    """The line whose turns it learns from; None where one line learns from all turns."""
    numbers: VersionNumbers | None = None
    """Where the lines of a run have their version numbers from; None if there is one line."""
    origin: Callable[[], Checkpoint | None] | None = None
    """What a line without a policy begins from; the base model without it, or if there is nothing."""

    @property
    def owner(self) -> str | None:
        """Whose line it is; None if it is not one person's own."""
        return None if self.name == SHARED else self.name


class Lineage:
    """The current step and policy version, and every change of them. One call at a time.

    Guarantees:
    - After `begin` or `prepare`, learner, sampler, checkpoints and ledger agree: exactly the steps in the policy count.
    - The steps in the state that was saved last count. Later steps were lost: they are made again from the same turns
      and under the same versions. Until that is done, the policy that served last serves.
    - The ledger knows of every policy what it was made from, before it serves.
    - A rollback has happened once the next start would continue from it. One that fails before is taken back.
    - A version number is never used for two policies. A lost step that is made again makes the same policy; where it
      differs, because a GPU's sums are not exact, the policy that serves in the end gets a new number.
    """

    def __init__(
        self,
        ledger: Ledger,
        learner: Learner,
        sampler: Sampler,
        checkpoints: Checkpoints,
        policies: Policies,
        options: LineOptions | None = None,
    ) -> None:
        self.options = options or LineOptions()
        self.name = self.options.name
        self.takes = self.options.takes
        self.numbers = self.options.numbers or VersionNumbers(ledger)
        self.ledger = ledger
        self.learner = learner
        self.sampler = sampler
        self.checkpoints = checkpoints
        self.policies = policies
        self.step = 0
        self.version = BASE_VERSION
        """Of the policy that the next step is made from. While lost steps are made again, a later one serves."""
        self.unsaved: list[Batch] = []
        """The steps that no kept checkpoint holds yet."""
        self.lost: list[Batch] = []
        """The steps after the current one that were lost, and are made again before others."""
        self._last: Checkpoint | None = None
        self._foreign: Checkpoint | None = None
        self._is_new_line = False
        """Whether the first policy must be saved, because the next start would continue from another one."""
        self._unfinished: list[int] = []
        """The versions that were published for a rollback which is not saved yet."""
        self._held: int | None = None
        """The version that was loaded only to be compared with, if any."""

    @property
    def is_saved(self) -> bool:
        """Whether the next start would continue from the current step."""
        return self.version == (self._last.version if self._last else BASE_VERSION)

    @property
    def served_step(self) -> int:
        """The step of the policy that serves."""
        return self.step + len(self.lost)

    @property
    def made(self) -> set[int]:
        """The versions of the current step and of the lost ones after it."""
        return {self.version, *(batch.version for batch in self.lost)}

    async def begin(self, checkpoint: Checkpoint | None, *, of_this_run: bool = True) -> None:
        """Agree with a checkpoint, or with the base model, before anything is served.

        A checkpoint that is not `of_this_run` only provides weights: the steps that this run made are rolled back.
        """
        for folder in (*self.checkpoints.folders, self.policies.folder):
            await asyncio.to_thread(remove_unfinished, folder)
        self._last = checkpoint if of_this_run else None
        self._foreign = None if of_this_run else checkpoint
        steps = {state.version: state.step for state in self.checkpoints.states()}
        latest = max(steps, default=BASE_VERSION)
        self.numbers.know(latest)
        self._is_new_line = checkpoint is not None or latest > BASE_VERSION
        if not of_this_run:
            self._is_new_line |= self.ledger.read(training.latest_version) > BASE_VERSION
            await self.ledger.write(training.follow, BASE_VERSION, line=self.name)
        await self._agree()
        await self.ledger.write(training.infer_policies, steps, self.name)
        if self._foreign is not None:
            self.version = await self.serve_as_new(self._foreign, BASE_VERSION)
        elif self._last is not None and self._last.version < latest:
            # An older checkpoint was asked for. From here on the run continues from it.
            self.version = await self.serve_as_new(self._last, self._last.version)
            self._last = await asyncio.to_thread(self.checkpoints.renumber, self._last, self.version)
            self.lost = []
        else:
            await self._serve_last()

    async def prepare(self) -> None:
        """Load the state that was saved last into the learner, and make the ledger agree with it."""
        self.take_back()
        await self.learner.start()
        await self._agree()
        if self.options.origin is not None and not (self._last or self._foreign or self.lost or self._is_new_line):
            self._foreign = await asyncio.to_thread(self.options.origin)
            self._is_new_line = self._foreign is not None
        start = self._last or self._foreign
        if start is not None:
            await self.learner.load(start.folder)
        else:
            await self.learner.reset()
        if self._last is None and self._is_new_line:
            await self._publish_start()
            await self.leave_line(retrain=False)

    async def write_policy(self) -> tuple[int, PolicyRef]:
        """Write the learner's policy under a new version number."""
        version = self.numbers.next()
        return version, await self.policies.write(self.learner, version)

    def repeated_version(self) -> int | None:
        """The version of a lost step that is made again while a later policy serves; None if its policy is to serve."""
        return (self.lost[0].version or self.numbers.next()) if len(self.lost) > 1 else None

    async def find_served(self, version: int, policy: PolicyRef) -> int | None:
        """The version that serves, if the lost steps have led to the same policy again, byte for byte.

        Then the copy that was written as `version` is removed, and its number is free again.
        """
        if not self.lost or self.lost[0].version != self.sampler.newest_version:
            return None
        served = self.lost[0].version
        if not await asyncio.to_thread(have_same_files, policy.folder, self.policies.folder_of(served)):
            return None
        await asyncio.to_thread(self.policies.remove, version)
        self.numbers.give_back(version)
        return served

    def skip_lost(self) -> None:
        """The next lost step cannot be made again. So those after it make other policies, with new numbers."""
        self.lost = [replace(batch, step=batch.step - 1, version=BASE_VERSION) for batch in self.lost[1:]]

    async def advance(self, version: int, turns: Sequence[int], metrics: Mapping[str, Any]) -> None:
        """Record a step on these turns that made policy `version`."""
        await self.ledger.write(training.apply_step, self.step + 1, version, turns, metrics, self.version, self.name)
        self.step = self.step + 1
        self.version = version
        self.lost = self.lost[1:]
        self.unsaved.append(Batch(self.step, version, tuple(turns)))

    async def save(self, *, kept: bool = True, for_guard: bool = False) -> None:
        """Write a checkpoint to be kept or, otherwise, a recovery state, which the next save replaces."""
        write = partial(self.learner.save, lasting=kept)
        state = (self.step, self.version, self.unsaved, write)
        self._last = await self.checkpoints.save(*state, kept=kept, for_guard=for_guard)
        if kept:
            self.unsaved = []

    async def save_copy(self, folder: Path, version: int) -> Checkpoint:
        """Copy a checkpoint as one of this line, whose policy has this version. None is removed for it."""

        async def copy(target: Path) -> None:
            await asyncio.to_thread(shutil.copytree, folder, target, ignore=lambda *_: {RECORD}, dirs_exist_ok=True)

        return await self.checkpoints.save(self.step + 1, version, (), copy, prunes=False)

    async def save_if_due(self, interval: int, recovery: Budget) -> None:
        """Write a checkpoint, due every `interval` steps, or else a recovery state if there is time for it."""
        kept = self.step % interval == 0 or len(self.unsaved) >= interval
        if not kept and not recovery.is_due:
            return
        started = time.monotonic()
        try:
            await self.save(kept=kept)
            recovery.add_cost(time.monotonic() - started)
        except (StepRefused, OSError) as error:
            log.error("The learner's state was not saved at step %d, the next step tries again: %s", self.step, error)

    async def serve_as_new(self, checkpoint: Checkpoint, parent: int) -> int:
        """Publish a checkpoint's policy under a new version number, which is returned.

        `parent` is its version in this run; the base model if it is another run's.
        """
        version = self.numbers.next()
        await self.ledger.write(training.add_policy, version, parent, line=self.name)
        await self.sampler.publish(version, await asyncio.to_thread(self.policies.adopt, checkpoint.folder, version))
        return version

    async def hold(self, checkpoint: Checkpoint) -> int:
        """Publish a checkpoint's policy under a new number, as a candidate that is never promoted. The one that was
        held before is taken back."""
        if self._held is not None:
            self.sampler.retract(self._held)
        self._held = version = self.numbers.next()
        await self.ledger.write(training.add_policy, version, checkpoint.version, line=self.name)
        await self.sampler.publish(version, policy_in(checkpoint.folder), candidate=True)
        return version

    async def begin_to_go_back(self, checkpoint: Checkpoint) -> int:
        """Serve a checkpoint's policy before `go_back` continues from it; the version under which it serves.

        `take_back` undoes it.
        """
        version = await self.serve_as_new(checkpoint, checkpoint.version)
        self._unfinished.append(version)
        return version

    def take_back(self) -> None:
        """Let the policy that served before an unfinished rollback serve again."""
        while self._unfinished:
            version = self._unfinished.pop()
            self.sampler.retract(version)
            self.policies.remove(version)

    async def go_back(self, checkpoint: Checkpoint, version: int, *, retrain: bool) -> int:
        """Continue learning from a checkpoint that serves as `version`; the version it serves as in the end.

        With `retrain`, the turns of the steps that are not in it are trained on again. `leave_line` has to follow.
        """
        self.unsaved = []
        await self.learner.load(checkpoint.folder)
        if self.sampler.newest_version != version:
            version = await self.begin_to_go_back(checkpoint)
        if retrain:
            # First the ledger: killed after that, the next start finds the old checkpoint, whose steps count again.
            await self.ledger.write(training.follow, version, undo_after=BASE_VERSION, line=self.name)
        # From here on the next start continues from this policy, even if the ledger does not know of it yet.
        self._last = await asyncio.to_thread(self.checkpoints.renumber, checkpoint, version)
        self.step, self.version, self._unfinished = checkpoint.step, version, []
        return version

    async def go_back_to_base(self, *, retrain: bool) -> int:
        """The same with the base model."""
        self.unsaved = []
        await self.learner.reset()
        self._foreign = None
        await self._publish_start(retrain=retrain)
        return self.version

    async def _publish_start(self, *, retrain: bool = False) -> None:
        """Save the learner's policy, which holds no step, so that the next start continues from it. Then it serves."""
        version, policy = await self.write_policy()
        # Of what another run made, this one has no record.
        is_of_run = self.options.origin is not None and self._foreign is not None
        parent = self._foreign.version if is_of_run and self._foreign else BASE_VERSION
        await self.ledger.write(training.add_policy, version, parent, line=self.name)
        self._unfinished.append(version)
        await self.sampler.publish(version, policy, candidate=True)
        if retrain:
            await self.ledger.write(training.follow, version, undo_after=BASE_VERSION, line=self.name)
        self._last = await self.checkpoints.save(0, version, (), self.learner.save)
        self.step, self.version, self.unsaved, self._unfinished = 0, version, [], []
        self.sampler.promote(version)

    async def leave_line(self, *, retrain: bool) -> None:
        """Let only the steps in the current policy count. Lost steps of the line before are not made again.

        With `retrain`, other steps may use their turns.
        """
        if not retrain:
            await self.ledger.write(training.give_up, self.lost, self.takes)
        self.lost = []
        await self.ledger.write(training.follow, self.version, line=self.name)

    async def _agree(self) -> None:
        last = self._last
        self.version, self.step, batches = (last.version, last.step, last.batches) if last else (BASE_VERSION, 0, ())
        undone = await self.ledger.write(training.reconcile, self.version, self.step, batches, self.name, self.takes)
        if undone:
            log.info("Steps %s are not in the state that was saved last. They are made again.", undone)
        self.unsaved = list(batches) if last and self.checkpoints.is_recovery(last) else []
        is_new = last is None and self._is_new_line
        self.lost = [] if is_new else self.ledger.read(training.steps_after, self.version, self.name)

    async def _serve_last(self) -> None:
        """Publish the policy that served last or, if it is gone, the one that learning continues from."""
        for batch in reversed(self.lost):
            folder = self.policies.folder_of(batch.version)
            if not folder.is_dir():
                continue
            try:
                await self.sampler.publish(batch.version, policy_in(folder))
                return
            except EngineUnavailable as error:
                log.warning("Policy %d cannot serve again, so an earlier one serves: %s", batch.version, error)
        if self._last is not None:
            version, policy = self._last.version, policy_in(self._last.folder)
            if self.checkpoints.is_recovery(self._last):
                # The next save removes that folder, while the sampler may have to load the policy again.
                try:
                    policy = await asyncio.to_thread(self.policies.adopt, policy.folder, version)
                except OSError as error:
                    log.warning("Policy %d serves from the recovery state, which was not copied: %s", version, error)
            await self.sampler.publish(version, policy)


def have_same_files(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or names != sorted(path.name for path in other.iterdir()):
        return False
    return not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])

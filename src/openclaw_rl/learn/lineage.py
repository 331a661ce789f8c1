"""Keeps learner, sampler, checkpoints and ledger at the same step and policy version."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.engines.base import Learner, Sampler
from openclaw_rl.engines.policy_ref import PolicyRef, policy_in
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints, remove_unfinished
from openclaw_rl.learn.policies import Policies
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.types import BASE_VERSION, Batch

log = logging.getLogger(__name__)


class Lineage:
    """The current step and policy version, and every change of them. One call at a time.

    Guarantees:
    - After `begin` or `prepare`, learner, sampler, checkpoints and ledger agree: exactly the steps in the policy count.
    - The steps in the last checkpoint count. Later steps are undone, and their turns are trained on again.
    - The ledger knows of every policy what it was made from, before it serves.
    - A version number is never used for two policies.
    """

    def __init__(
        self, ledger: Ledger, learner: Learner, sampler: Sampler, checkpoints: Checkpoints, policies: Policies
    ) -> None:
        self.ledger, self.learner, self.sampler = ledger, learner, sampler
        self.checkpoints, self.policies = checkpoints, policies
        self.step, self.version = 0, BASE_VERSION
        self.unsaved: list[Batch] = []
        """The steps that no checkpoint holds yet."""
        self._parent = BASE_VERSION
        """The version that the next step is made from. After a crash of the learner it is not the one that serves."""
        self._last: Checkpoint | None = None
        self._foreign: Checkpoint | None = None
        self._is_new_line = False
        """Whether the first policy must be saved, because the next start would continue from another one."""
        self._latest = BASE_VERSION

    async def begin(self, checkpoint: Checkpoint | None, *, own: bool = True) -> None:
        """Agree with a checkpoint, or with the base model, before anything is served.

        A checkpoint that is not this run's `own` only provides weights: the steps that this run made are rolled back.
        """
        for folder in (self.checkpoints.folder, self.policies.folder):
            await asyncio.to_thread(remove_unfinished, folder)
        self._last = checkpoint if own else None
        self._foreign = None if own else checkpoint
        self._latest = self._newest_saved()
        self._is_new_line = checkpoint is not None or self._latest > BASE_VERSION
        if not own:
            self._is_new_line |= self.ledger.latest_version() > BASE_VERSION
            await self.ledger.follow(BASE_VERSION)
        await self._agree()
        if self._foreign is not None:
            self.version = await self.serve_again(self._foreign, BASE_VERSION)
        elif self._last is not None and self._last.version < self._latest:
            # An older checkpoint was asked for. From here on the run continues from it.
            self._parent = self.version = await self.serve_again(self._last, self._last.version)
            self._last = await asyncio.to_thread(self.checkpoints.renumber, self._last, self.version)
        elif self._last is not None:
            self.version = self._last.version
            await self.sampler.publish(self.version, policy_in(self._last.folder))

    async def prepare(self) -> None:
        """Load the last checkpoint into the learner, and make the ledger agree with it."""
        await self.learner.start()
        await self._agree()
        start = self._last or self._foreign
        if start is not None:
            await self.learner.load(start.folder)
        else:
            await self.learner.reset()
        if self._last is None and self._is_new_line:
            await self._publish_start()

    async def write_policy(self) -> tuple[int, PolicyRef]:
        """Write the learner's policy under a new version number."""
        version = self._new_version()
        return version, await self.policies.write(self.learner, version)

    async def advance(self, version: int, turns: Sequence[int], metrics: Mapping[str, Any]) -> None:
        """Record a step on these turns that made policy `version`."""
        await self.ledger.apply_step(self.step + 1, version, turns, metrics, self._parent)
        self.step, self.version, self._parent = self.step + 1, version, version
        self.unsaved.append(Batch(self.step, version, tuple(turns)))

    async def save(self) -> None:
        """Write a checkpoint."""
        self._last = await self.checkpoints.save(self.step, self.version, self.unsaved, self.learner.save)
        self.unsaved = []

    async def serve_again(self, checkpoint: Checkpoint, parent: int) -> int:
        """Publish a checkpoint's policy under a new version number, which is returned.

        `parent` is its version in this run; the base model if it is another run's.
        """
        version = self._new_version()
        await self.ledger.add_policy(version, parent)
        await self.sampler.publish(version, await asyncio.to_thread(self.policies.adopt, checkpoint.folder, version))
        return version

    async def go_back(self, checkpoint: Checkpoint, version: int, *, retrain: bool) -> int:
        """Continue learning from a checkpoint that serves as `version`; the version it serves as in the end.

        With `retrain`, the turns of the steps that are not in it are trained on again.
        """
        self.unsaved = []
        await self.learner.load(checkpoint.folder)
        if self.sampler.newest_version != version:
            version = await self.serve_again(checkpoint, checkpoint.version)
        self.step, self.version, self._parent = checkpoint.step, version, version
        if retrain:
            # First the ledger: killed after that, the next start finds the old checkpoint, whose steps count again.
            await self.ledger.follow(version, retrain=True)
        # From here on the next start continues from this policy, even if the ledger does not know of it yet.
        self._last = await asyncio.to_thread(self.checkpoints.renumber, checkpoint, version)
        await self.ledger.follow(version)
        return version

    async def go_back_to_base(self, *, retrain: bool) -> int:
        """The same with the base model."""
        self.unsaved = []
        await self.learner.reset()
        await self._publish_start(retrain=retrain)
        return self.version

    async def _publish_start(self, *, retrain: bool = False) -> None:
        """Publish and save the learner's policy, which holds no step, so that the next start continues from it."""
        version, policy = await self.write_policy()
        await self.ledger.add_policy(version, BASE_VERSION)
        await self.sampler.publish(version, policy)
        self.step, self.version, self._parent = 0, version, version
        if retrain:
            await self.ledger.follow(version, retrain=True)
        await self.save()
        await self.ledger.follow(version)

    async def _agree(self) -> None:
        last = self._last
        self._parent, self.step, batches = (last.version, last.step, last.batches) if last else (BASE_VERSION, 0, ())
        undone = await self.ledger.reconcile(self._parent, self.step, batches)
        if undone:
            log.info("Steps %s are not in the checkpoint; their turns are trained on again.", undone)
        self.unsaved = []

    def _new_version(self) -> int:
        """A version number that no policy has had."""
        self._latest = max(self._latest, self.version, self.ledger.latest_version()) + 1
        return self._latest

    def _newest_saved(self) -> int:
        return max((checkpoint.version for checkpoint in self.checkpoints.all()), default=BASE_VERSION)

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
    - After `begin` or `prepare`, learner, sampler, checkpoints and ledger agree.
    - The steps in the last checkpoint count. Later steps are undone, and their turns are trained on again.
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
        self._last: Checkpoint | None = None
        self._foreign: Checkpoint | None = None
        self._origin = 0
        self._latest = BASE_VERSION

    async def begin(self, checkpoint: Checkpoint | None, *, own: bool = True) -> None:
        """Agree with a checkpoint, or with the base model, before anything is served.

        A checkpoint that is not this run's `own` only provides weights. The steps that this run made still count.
        """
        for folder in (self.checkpoints.folder, self.policies.folder):
            await asyncio.to_thread(remove_unfinished, folder)
        self._last = checkpoint if own else None
        self._foreign = None if own else checkpoint
        self._origin = 0 if own else self.ledger.latest_step()
        # The ledger may not know the version of a policy that was rolled back to.
        self._latest = self._newest_saved()
        await self._agree()
        if self._last is not None:
            self.version = self._last.version
            await self.sampler.publish(self.version, policy_in(self._last.folder))
        elif self._foreign is not None:
            self.version = await self.serve_again(self._foreign)

    async def prepare(self) -> None:
        """Load the last checkpoint into the learner, and make the ledger agree with it."""
        await self.learner.start()
        await self._agree()
        start = self._last or self._foreign
        if start is not None:
            await self.learner.load(start.folder)
        else:
            await self.learner.reset()
        if self._is_new_line():
            await self._publish_start(self.step)

    async def write_policy(self) -> tuple[int, PolicyRef]:
        """Write the learner's policy under a new version number."""
        version = self._new_version()
        return version, await self.policies.write(self.learner, version)

    async def advance(self, version: int, turns: Sequence[int], metrics: Mapping[str, Any]) -> None:
        """Record a step on these turns that made policy `version`."""
        await self.ledger.apply_step(self.step + 1, version, turns, metrics)
        self.step, self.version = self.step + 1, version
        self.unsaved.append(Batch(self.step, version, tuple(turns)))

    async def save(self, replaced: Checkpoint | None = None) -> None:
        """Write a checkpoint. `replaced` is the one that was rolled back to, which the new one replaces."""
        self._last = await self.checkpoints.save(self.step, self.version, self.unsaved, self.learner.save, replaced)
        self.unsaved = []

    async def serve_again(self, checkpoint: Checkpoint) -> int:
        """Publish a checkpoint's policy under a new version number, which is returned."""
        version = self._new_version()
        await self.sampler.publish(version, await asyncio.to_thread(self.policies.adopt, checkpoint.folder, version))
        return version

    async def go_back(self, checkpoint: Checkpoint, version: int) -> int:
        """Continue learning from a checkpoint that serves as `version`; the version it serves as in the end."""
        self.unsaved = []
        await self.learner.load(checkpoint.folder)
        if self.sampler.newest_version != version:
            version = await self.serve_again(checkpoint)
        self.step, self.version = checkpoint.step, version
        # From here on the next start continues from the earlier policy, even if the ledger does not know of it yet.
        await self.save(replaced=checkpoint)
        await self.ledger.roll_back(checkpoint.step)
        return version

    async def go_back_to_base(self) -> int:
        """Continue learning from the base model; the version under which it serves."""
        self.unsaved = []
        await self.learner.reset()
        await self._publish_start(0)
        await self.ledger.roll_back(0)
        return self.version

    async def _publish_start(self, step: int) -> None:
        """Publish and save the learner's policy, so that the next start continues from it."""
        version, policy = await self.write_policy()
        await self.sampler.publish(version, policy)
        self.step, self.version = step, version
        await self.save()

    async def _agree(self) -> None:
        step, batches = (self._last.step, self._last.batches) if self._last else (self._origin, ())
        undone = await self.ledger.reconcile(step, batches, self._last.version if self._last else None)
        if undone:
            log.info("Steps %s are not in the checkpoint; their turns are trained on again.", undone)
        self.step, self.unsaved = step, []

    def _is_new_line(self) -> bool:
        """Whether this run has steps or checkpoints that the current policy does not descend from."""
        if self._last is not None:
            return self._last.version < self._newest_saved()
        return self._foreign is not None or self._origin > 0 or bool(self.checkpoints.all())

    def _new_version(self) -> int:
        """A version number that no policy has had."""
        self._latest = max(self._latest, self.version, self.ledger.latest_version()) + 1
        return self._latest

    def _newest_saved(self) -> int:
        return max((checkpoint.version for checkpoint in self.checkpoints.all()), default=BASE_VERSION)

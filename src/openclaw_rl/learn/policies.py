"""The folders of policy versions in the run directory."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from openclaw_rl.engines.base import Learner
from openclaw_rl.engines.policy_ref import PolicyRef, policy_in
from openclaw_rl.learn.checkpoints import UNFINISHED, replace_folder
from openclaw_rl.models import NOT_THE_POLICY


class Policies:
    """Writes a folder for each policy version and keeps the last `keep`."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    async def write(self, learner: Learner, version: int) -> PolicyRef:
        """Write the learner's policy into the version's folder."""
        unfinished = self.folder / f"{UNFINISHED}v{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        policy = await learner.write_policy(unfinished)
        return replace(policy, folder=await asyncio.to_thread(self._finish, unfinished, version))

    def adopt(self, folder: Path, version: int) -> PolicyRef:
        """Copy a checkpoint's policy into the version's folder."""
        unfinished = self.folder / f"{UNFINISHED}v{version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for path in folder.iterdir():
            if not NOT_THE_POLICY.fullmatch(path.name):
                shutil.copy(path, unfinished)
        return policy_in(self._finish(unfinished, version))

    def remove(self, version: int) -> None:
        """Remove a version that is not served, so that it does not displace one that is."""
        shutil.rmtree(self._folder(version), ignore_errors=True)

    def _folder(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"

    def _finish(self, unfinished: Path, version: int) -> Path:
        target = self._folder(version)
        replace_folder(unfinished, target)
        for folder in sorted(self.folder.glob("v*"))[: -self.keep]:
            shutil.rmtree(folder, ignore_errors=True)
        return target

"""The folders of policy versions in the run directory."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from openclaw_rl.engines.base import Learner, PolicyRef, policy_in
from openclaw_rl.learn.checkpoints import replace_folder, unfinished
from openclaw_rl.models import NOT_THE_POLICY


class Policies:
    """Writes a folder for each policy version and keeps the last `keep`. A folder appears only when it is complete."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    @classmethod
    def of_run(cls, run_dir: Path, keep: int = 1) -> "Policies":
        return cls(run_dir / "policies", keep)

    async def write(self, learner: Learner, version: int) -> PolicyRef:
        """Write the learner's policy into the version's folder."""
        with unfinished(self.folder, f"v{version}") as folder:
            policy = await learner.write_policy(folder)
            return replace(policy, folder=await asyncio.to_thread(self._finish, folder, version))

    def adopt(self, source: Path, version: int) -> PolicyRef:
        """Copy a checkpoint's policy into the version's folder."""
        with unfinished(self.folder, f"v{version}") as folder:
            for path in source.iterdir():
                if not NOT_THE_POLICY.fullmatch(path.name):
                    shutil.copy(path, folder)
            return policy_in(self._finish(folder, version))

    def versions(self) -> list[int]:
        """The versions that have a folder."""
        names = (path.name[1:] for path in self.folder.glob("v*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def remove(self, version: int) -> None:
        """Remove a version that is not served, so that it does not displace one that is."""
        shutil.rmtree(self.folder_of(version), ignore_errors=True)

    def folder_of(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"

    def _finish(self, folder: Path, version: int) -> Path:
        target = self.folder_of(version)
        replace_folder(folder, target)
        for old in sorted(self.folder.glob("v*"))[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

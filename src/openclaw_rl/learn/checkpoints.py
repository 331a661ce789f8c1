"""What learning keeps on disk: checkpoints, the newest state of the learner for recovery after a crash, and policies.

A checkpoint is a folder with the policy, the learner's state and a record: the step, the policy version, the batches
since the checkpoint before it, and digests of its files.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import string
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from openclaw_rl.engines.base import Learner, PolicyRef, policy_in
from openclaw_rl.models import NOT_THE_POLICY
from openclaw_rl.types import BASE_VERSION, SHARED, Batch

log = logging.getLogger(__name__)

RECORD = "checkpoint.json"
#: In a run directory.
FOLDER = "checkpoints"
#: The prefix of folders that are not finished.
UNFINISHED = ".unfinished-"


#: In a run directory: a folder for each line but the shared one, whose files are in the run directory itself.
LINES = "lines"
#: What stands for itself in the name of such a folder.
PLAIN = f"{string.ascii_lowercase}{string.digits}-_"


def line_folder(run_dir: Path, name: str) -> Path:
    """The folder of a line's checkpoints, policies and numbers."""
    # A name that says nothing, or a way elsewhere, is the name of one folder all the same. Capitals are quoted, because
    # some disks do not tell them from small letters.
    quoted = "".join(chr(byte) if chr(byte) in PLAIN else f"%{byte:02X}" for byte in name.encode()) or "%"
    return run_dir if name == SHARED else run_dir / LINES / quoted


def lines_on_disk(run_dir: Path) -> list[str]:
    """The lines that a run has besides the shared one."""
    return sorted(unquote(folder.name) for folder in (run_dir / LINES).glob("*") if folder.is_dir())


class BadCheckpoint(Exception):
    """The folder is not a usable checkpoint; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state that learning can continue from."""

    folder: Path
    """It stays where it is until it is removed as one of the oldest."""
    step: int
    versions: tuple[int, ...]
    """The numbers under which its policy has served. Each rollback to it adds one."""
    created: float
    batches: tuple[Batch, ...]
    """The steps that are in no earlier checkpoint."""
    is_base_model: bool = False
    """Whether it has no weights of its own, so that the next start continues from the base model."""
    for_guard: bool = False
    """Whether it was saved only because its policy was the last good one."""
    merged: tuple[int, ...] = ()
    """The versions of which it is the average, if it was merged."""
    last_step_at: float = 0.0
    """When the last step in these was recorded. Another run has other policies under their numbers."""

    @property
    def version(self) -> int:
        """The newest of its numbers."""
        return self.versions[-1]


class Checkpoints:
    """The checkpoints of a run, the newest last. Newer means a higher policy version, not a higher step.

    A recovery state is a checkpoint in a folder beside them. It only serves to continue after a crash.

    Guarantees:
    - A checkpoint is written whole or not at all, also when the process is killed.
    - `latest` returns only a checkpoint whose files match their digests.
    - Only the newest `keep` stay, and one recovery state if it is newer than they are. The checkpoint of the last good
      policy also stays; what was saved only for that goes when another one is the last good one.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self.recovery = folder.with_name("recovery")
        self.good: int | None = None
        """The version of the last good policy, if somebody watches over that."""

    @classmethod
    def of_run(cls, run_dir: Path, keep: int) -> "Checkpoints":
        return cls(run_dir / FOLDER, keep)

    @property
    def folders(self) -> tuple[Path, Path]:
        return self.folder, self.recovery

    def all(self) -> list[Checkpoint]:
        """All that are kept and have a readable record. Damaged ones are logged and left out."""
        return self._in(self.folder)

    def states(self) -> list[Checkpoint]:
        """All that learning can continue from: the checkpoints and the recovery state."""
        # Of two with the same version, the checkpoint is the newer one: the recovery state can go.
        return by_version([*self._in(self.recovery), *self._in(self.folder)])

    def is_recovery(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.folder.parent == self.recovery

    def _in(self, parent: Path) -> list[Checkpoint]:
        checkpoints = []
        for path in parent.glob(f"*/{RECORD}"):
            if path.parent.name.startswith(UNFINISHED):
                continue
            try:
                checkpoints.append(read_record(path.parent))
            except BadCheckpoint as error:
                log.warning("%s It is left out.", error)
        return by_version(checkpoints)

    def latest(self) -> Checkpoint | None:
        """The newest, for recovery or kept, whose files match their digests."""
        for checkpoint in reversed(self.states()):
            try:
                verify(checkpoint.folder)
                return checkpoint
            except BadCheckpoint as error:
                log.error("%s The one before it is used.", error)
        return None

    async def save(
        self,
        step: int,
        version: int,
        batches: Sequence[Batch],
        write: Callable[[Path], Awaitable[None]],
        *,
        kept: bool = True,
        for_guard: bool = False,
        prunes: bool = True,
    ) -> Checkpoint:
        """Let `write` fill a folder, and turn it into a checkpoint or recovery state atomically.

        With `prunes`, the oldest are removed.
        """
        name = f"step-{step:06d}-v{version}"
        parent = self.folder if kept else self.recovery
        record = {
            "step": step,
            "version": version,
            "created": time.time(),
            "batches": [asdict(batch) for batch in batches],
            "for_guard": for_guard,
        }
        with unfinished(parent, name) as folder:
            await write(folder)
            # In a thread, because hashing and syncing gigabytes would block requests.
            return await asyncio.to_thread(self._finish, folder, parent / name, record, prunes)

    def _finish(self, folder: Path, target: Path, record: dict[str, Any], prunes: bool) -> Checkpoint:
        write_record(folder, {**record, "files": digests(folder)})
        replace_folder(folder, target)
        if prunes:
            self.prune()
        return read_record(target)

    def renumber(self, checkpoint: Checkpoint, version: int) -> Checkpoint:
        """Make a checkpoint the newest one, because its policy serves again under a new number."""
        record = json.loads((checkpoint.folder / RECORD).read_text())
        record["served_again"] = [*checkpoint.versions[1:], version]
        with unfinished(self.folder, f"{checkpoint.folder.name}-record") as folder:
            write_record(folder, record)
            sync(folder / RECORD)
            (folder / RECORD).replace(checkpoint.folder / RECORD)
        sync(checkpoint.folder)
        return read_record(checkpoint.folder)

    def save_base_model(self, version: int) -> Checkpoint:
        """Let the next start continue from the base model. The learner's first checkpoint replaces this one."""

        async def write_nothing(folder: Path) -> None: ...

        return asyncio.run(self.save(0, version, (), write_nothing))

    def remove(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Remove checkpoints or recovery states, and unfinished folders."""
        for checkpoint in checkpoints:
            self._discard(checkpoint)
        for folder in self.folders:
            remove_unfinished(folder)

    def prune(self) -> None:
        """Remove all but the newest, and unfinished folders."""
        saved = self.all()
        newest = self.states()[-1:]
        usual = [one for one in saved if not one.for_guard]
        old = [one for one in usual[: -self.keep] if self.good not in one.versions]
        old += [one for one in saved[:-1] if one.for_guard and self.good not in one.versions]
        superseded = [state for state in self._in(self.recovery) if state not in newest]
        self.remove([*old, *superseded, *(one for one in saved[:-1] if one.is_base_model and one not in old)])

    def _discard(self, checkpoint: Checkpoint) -> None:
        """Rename the folder to an unfinished one; `prune` removes it. A crash in between leaves no half checkpoint."""
        with contextlib.suppress(OSError):
            checkpoint.folder.rename(checkpoint.folder.with_name(f"{UNFINISHED}{checkpoint.folder.name}"))


def by_version(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.version)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")


def read_record(folder: Path) -> Checkpoint:
    """Read a checkpoint's record without checking its files. Raises BadCheckpoint."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
        batches = tuple(
            Batch(int(b["step"]), int(b["version"]), tuple(map(int, b["turns"]))) for b in record["batches"]
        )
        versions = tuple(map(int, (record["version"], *record.get("served_again", ()))))
        if not isinstance(record["files"], dict):
            raise ValueError("the record lists no files")
        step = int(record["step"])
        created = float(record["created"])
        for_guard = record.get("for_guard") is True
        merged = tuple(map(int, record.get("merged", ())))
        last_step_at = float(record.get("last_step_at", 0.0))
        is_base = not record["files"]
        return Checkpoint(folder, step, versions, created, batches, is_base, for_guard, merged, last_step_at)
    except FileNotFoundError:
        raise BadCheckpoint(f"{folder} is not a checkpoint: {RECORD} is missing.") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise BadCheckpoint(f"The checkpoint {folder} is damaged: {error!r}.") from error


def verify(folder: Path) -> None:
    """Compare a checkpoint's files with their digests. Raises BadCheckpoint."""
    read_record(folder)
    files: dict[str, str] = json.loads((folder / RECORD).read_text())["files"]
    for name, expected in files.items():
        try:
            actual = digest(folder / name)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"The checkpoint {folder} is damaged: {name}: {error}.") from error
        if actual != expected:
            raise BadCheckpoint(f"The checkpoint {folder} is damaged: {name} is not what was written.")


def write_new_record(folder: Path, merged: Sequence[int] = (), last_step_at: float = 0.0) -> None:
    """Make a folder with a policy, perhaps merged from these versions, a checkpoint that holds no step of any run."""
    record = {"step": 0, "version": BASE_VERSION + 1, "created": time.time(), "batches": []}
    of_merged = {"merged": list(merged), "last_step_at": last_step_at}
    write_record(folder, {**record, **of_merged, "files": digests(folder)})


def digests(folder: Path) -> dict[str, str]:
    return {path.name: digest(path) for path in sorted(folder.iterdir())}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def unfinished(parent: Path, name: str) -> Iterator[Path]:
    """A new folder to fill and then to rename. It is removed if that fails: on a full disk it would be in the way."""
    folder = parent / f"{UNFINISHED}{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(parent: Path) -> None:
    """Remove the folders that a killed process did not finish."""
    for folder in parent.glob(f"{UNFINISHED}*"):
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(source: Path, target: Path) -> None:
    """Sync a folder to the disk and give it its final name."""
    for path in source.iterdir():
        sync(path)
    sync(source)
    shutil.rmtree(target, ignore_errors=True)
    source.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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

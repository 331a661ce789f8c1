"""Going back to an earlier policy: because somebody asks for it, or because turns were deleted that it learned from.

Deleted turns also go from the files of the run beside its ledger.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import BadCheckpoint, Checkpoint, Checkpoints, Policies, line_folder, verify
from openclaw_rl.learn.reporting import RECORDS_FILE, prune_records
from openclaw_rl.ledger import deletion, training
from openclaw_rl.ledger.deletion import WIPE_LATER
from openclaw_rl.ledger.schema import open_ledger, transaction
from openclaw_rl.ledger.screenshot_folders import delete_screenshots
from openclaw_rl.ledger.sessions import session_ids
from openclaw_rl.ledger.training import follow, policy_line, versions_with_deleted_turns
from openclaw_rl.ledger.turns import turn_numbers
from openclaw_rl.types import BASE_VERSION, SHARED, Batch

log = logging.getLogger(__name__)


class CannotRollBack(UserError):
    """There is no policy to roll back to, or it cannot be used."""


def choose_checkpoint(
    checkpoints: Sequence[Checkpoint], version: int | None, step: int, line: Container[int]
) -> Checkpoint | None:
    """The checkpoint of a policy version. Raises CannotRollBack.

    Without a version, the last checkpoint before `step` among those that the current policy was made from: their
    versions are in `line`. None is the base model: version 0, and the state before the first checkpoint.
    """
    if not version and not step:
        raise CannotRollBack("Nothing has been learned, so there is nothing to roll back.")
    if version is None:
        earlier = [c for c in checkpoints if c.step < step and any(number in line for number in c.versions)]
        fitting = sorted(earlier, key=lambda checkpoint: checkpoint.step)[-1:]
    else:
        fitting = [checkpoint for checkpoint in checkpoints if version in checkpoint.versions]
    if not fitting and not version:
        return None
    if not fitting:
        others = ", ".join(str(checkpoint.version) for checkpoint in checkpoints)
        raise CannotRollBack(
            f"There is no checkpoint of policy version {version}, "
            + (f"only of {others}. " if others else "and there are no others. ")
            + "One is made every --save-interval steps and when the server stops; 0 is the base model."
        )
    try:
        verify(fitting[0].folder)
    except BadCheckpoint as error:
        raise CannotRollBack(str(error)) from error
    return None if fitting[0].is_base_model else fitting[0]


def roll_back_offline(db: Connection, checkpoints: Checkpoints, version: int | None, line: str = SHARED) -> int:
    """Make an earlier checkpoint of a line the newest one, so that the next start continues from it.

    Raises CannotRollBack.

    Returns its new policy version.
    """
    states = checkpoints.states()
    saved, step = (states[-1].version, states[-1].step) if states else (BASE_VERSION, 0)
    # Steps after a crash that were not made again yet belong to the policy that the next start serves.
    lost = training.steps_after(db, saved, line)
    made_from = training.policy_line(db, lost[-1].version if lost else saved)
    checkpoint = choose_checkpoint(checkpoints.all(), version, step + len(lost), made_from)
    return roll_back_to(checkpoint, db, checkpoints, lost=lost, line=line)


def roll_back_to(
    checkpoint: Checkpoint | None,
    db: Connection,
    checkpoints: Checkpoints,
    *,
    lost: Sequence[Batch] = (),
    retrain: bool = False,
    line: str = SHARED,
) -> int:
    """Let the next start continue from a checkpoint, or from the base model; its new policy version.

    With `retrain`, the turns of the steps that are not in it wait to be trained on again.
    """
    version = max([training.latest_version(db), *(state.version for state in checkpoints.states())]) + 1
    # If this is killed in between, the next start continues from the old checkpoint, and its steps count again.
    with transaction(db):
        if not retrain:
            training.give_up(db, lost)
        training.add_policy(db, version, checkpoint.version if checkpoint else BASE_VERSION, line=line)
        training.follow(db, version, undo_after=BASE_VERSION if retrain else None, line=line)
    if checkpoint:
        checkpoints.renumber(checkpoint, version)
    else:
        checkpoints.save_base_model(version)
    return version


@dataclass(frozen=True, slots=True)
class Traces:
    """The states on disk that contain some turns."""

    checkpoints: list[Checkpoint]
    policies: list[int]
    """The versions of policy folders."""

    def __bool__(self) -> bool:
        return bool(self.checkpoints or self.policies)


def find_traces(versions: Collection[int], checkpoints: Checkpoints, policies: Policies) -> Traces:
    """The states on disk of these policy versions."""
    return Traces(
        [checkpoint for checkpoint in checkpoints.states() if set(checkpoint.versions) & set(versions)],
        [version for version in policies.versions() if version in versions],
    )


def newest_without(
    versions: Collection[int], checkpoints: Sequence[Checkpoint], line: Collection[int]
) -> Checkpoint | None:
    """The last checkpoint that the current policy was made from and that is none of these versions.

    `line` has the versions that the current policy was made from. None is the base model.
    """
    ancestors = [checkpoint for checkpoint in checkpoints if set(checkpoint.versions) & set(line)]
    for checkpoint in sorted(ancestors, key=lambda checkpoint: checkpoint.step, reverse=True):
        if not set(checkpoint.versions) & set(versions):
            try:
                verify(checkpoint.folder)
                return checkpoint
            except BadCheckpoint:
                continue
    return None


def newest_until(
    last: int, checkpoints: Sequence[Checkpoint], line: Collection[int], *, has_steps: bool
) -> tuple[list[int], Checkpoint | None]:
    """The versions of the line after `last`, and the newest checkpoint without them; None is the base model.

    If the line `has_steps`, what it began with, which has none of them, is no later version.
    """
    begun = {version for one in checkpoints if has_steps and not one.step for version in one.versions}
    later = [version for version in line if version > last and version not in begun]
    checkpoint = newest_without(later, checkpoints, line)
    return later, None if checkpoint is None or checkpoint.is_base_model else checkpoint


def remove(traces: Traces, checkpoints: Checkpoints, policies: Policies) -> None:
    checkpoints.remove(traces.checkpoints)
    for version in traces.policies:
        policies.remove(version)


def retrain_offline(db: Connection, checkpoints: Checkpoints, policies: Policies, line: str = SHARED) -> int:
    """Let the next start continue from a line's newest state without deleted turns, and delete those with them.

    Returns the policy version from which it continues. The turns of later steps wait to be trained on again.
    """
    versions = versions_with_deleted_turns(db)
    current = max((state.version for state in checkpoints.states()), default=BASE_VERSION)
    if current in versions:
        start = newest_without(versions, checkpoints.all(), policy_line(db, current))
        current = roll_back_to(start, db, checkpoints, retrain=True, line=line)
    else:
        # Steps that no checkpoint holds may have used them.
        with transaction(db):
            follow(db, current, undo_after=BASE_VERSION, line=line)
    remove(find_traces(versions, checkpoints, policies), checkpoints, policies)
    return current


def drop_line_offline(db: Connection, run_dir: Path, line: str) -> None:
    """Delete a person's line while no server runs: nothing of it stays on disk, and its steps no longer count."""
    with transaction(db):
        follow(db, BASE_VERSION, line=line)
    shutil.rmtree(line_folder(run_dir, line), ignore_errors=True)


def finish_deletions(run_dir: Path, db: Connection, say: Callable[[str], None], *, beside_server: bool) -> None:
    """Remove what was deleted from the ledger from all files of the run; `say` is told a sentence about what remains.

    - Removes the records of turns that are not in the ledger, the screenshots of deleted sessions, and what SQLite left
      of deleted rows.
    - A program that is killed before the end leaves the rest to the next call.
    """
    file = run_dir / RECORDS_FILE
    try:
        prune_records(file, set(turn_numbers(db)))
    except OSError as error:
        say(f"{file} still has deleted turns, because it could not be written ({error.strerror}): {WIPE_LATER}.")
    finished = delete_screenshots(run_dir, deletion.unfinished(db), session_ids(db, ""), say)
    if remains := deletion.wipe(db, finished, beside_server=beside_server):
        say(f"Remains are still in the ledger's files, because {remains}.")


def finish_interrupted_deletions(run_dir: Path, ledger_dir: Path) -> None:
    """At the start of a server: finish the deletions of a program that was killed, and log what remains."""
    with open_ledger(ledger_dir, create_missing=True) as db:
        if deletion.unfinished(db):
            finish_deletions(run_dir, db, lambda problem: log.warning("%s", problem), beside_server=True)


def reports(run_dir: Path) -> list[Path]:
    """The pages about the run that `openclaw-rl report` wrote into its directory: they quote turns."""
    return sorted(run_dir.glob("report*.html"))

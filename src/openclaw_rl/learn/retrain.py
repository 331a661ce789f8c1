"""Training again without deleted turns: which states on disk were trained on them, and what is left to start from."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from sqlite3 import Connection

from openclaw_rl.learn.checkpoints import BadCheckpoint, Checkpoint, Checkpoints, verify
from openclaw_rl.learn.policies import Policies
from openclaw_rl.learn.rollback import roll_back_to
from openclaw_rl.ledger.schema import transaction
from openclaw_rl.ledger.training import follow, policy_line, versions_with_deleted_turns
from openclaw_rl.types import BASE_VERSION


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
    own = [checkpoint for checkpoint in checkpoints if set(checkpoint.versions) & set(line)]
    for checkpoint in sorted(own, key=lambda checkpoint: checkpoint.step, reverse=True):
        if not set(checkpoint.versions) & set(versions):
            try:
                verify(checkpoint.folder)
                return checkpoint
            except BadCheckpoint:
                continue
    return None


def remove(traces: Traces, checkpoints: Checkpoints, policies: Policies) -> None:
    checkpoints.remove(traces.checkpoints)
    for version in traces.policies:
        policies.remove(version)


def retrain_offline(db: Connection, checkpoints: Checkpoints, policies: Policies) -> int:
    """Let the next start continue from the newest state without deleted turns, and delete those with them.

    Returns the policy version from which it continues. The turns of later steps wait to be trained on again.
    """
    versions = versions_with_deleted_turns(db)
    current = max((state.version for state in checkpoints.states()), default=BASE_VERSION)
    if current in versions:
        start = newest_without(versions, checkpoints.all(), policy_line(db, current))
        current = roll_back_to(start, db, checkpoints, retrain=True)
    else:
        # Steps that no checkpoint holds may have used them.
        with transaction(db):
            follow(db, current, undo_after=BASE_VERSION)
    remove(find_traces(versions, checkpoints, policies), checkpoints, policies)
    return current

"""Which checkpoint a rollback returns to, and a rollback while no server runs."""

from collections.abc import Container, Sequence
from sqlite3 import Connection

from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import BadCheckpoint, Checkpoint, Checkpoints, verify
from openclaw_rl.ledger import training
from openclaw_rl.ledger.schema import transaction
from openclaw_rl.types import BASE_VERSION, Batch


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


def roll_back_offline(db: Connection, checkpoints: Checkpoints, version: int | None) -> int:
    """Make an earlier checkpoint the newest one, so that the next start continues from it. Raises CannotRollBack.

    Returns its new policy version.
    """
    states = checkpoints.states()
    saved, step = (states[-1].version, states[-1].step) if states else (BASE_VERSION, 0)
    # Steps after a crash that were not made again yet belong to the policy that the next start serves.
    lost = training.steps_after(db, saved)
    line = training.policy_line(db, lost[-1].version if lost else saved)
    checkpoint = choose_checkpoint(checkpoints.all(), version, step + len(lost), line)
    return roll_back_to(checkpoint, db, checkpoints, lost=lost)


def roll_back_to(
    checkpoint: Checkpoint | None,
    db: Connection,
    checkpoints: Checkpoints,
    *,
    lost: Sequence[Batch] = (),
    retrain: bool = False,
) -> int:
    """Let the next start continue from a checkpoint, or from the base model; its new policy version.

    With `retrain`, the turns of the steps that are not in it wait to be trained on again.
    """
    version = max([training.latest_version(db), *(state.version for state in checkpoints.states())]) + 1
    # If this is killed in between, the next start continues from the old checkpoint, and its steps count again.
    with transaction(db):
        if not retrain:
            training.give_up(db, lost)
        training.add_policy(db, version, checkpoint.version if checkpoint else BASE_VERSION)
        training.follow(db, version, undo_after=BASE_VERSION if retrain else None)
    if checkpoint:
        checkpoints.renumber(checkpoint, version)
    else:
        checkpoints.save_base_model(version)
    return version

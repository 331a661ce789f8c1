"""Which checkpoint a rollback returns to, and a rollback while no server runs."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import RECORD, BadCheckpoint, Checkpoint, Checkpoints, verify
from openclaw_rl.ledger.offline import OfflineLedger


class CannotRollBack(UserError):
    """There is no policy to roll back to, or it cannot be used."""


def choose_checkpoint(checkpoints: Sequence[Checkpoint], version: int | None, step: int) -> Checkpoint | None:
    """The checkpoint of a policy version or, without one, the last checkpoint before `step`. Raises CannotRollBack.

    None is the base model: version 0, and the state before the first checkpoint.
    """
    if not version and not step:
        raise CannotRollBack("Nothing has been learned, so there is nothing to roll back.")
    before = [checkpoint for checkpoint in checkpoints if checkpoint.step < step]
    fitting = before[-1:] if version is None else [c for c in checkpoints if c.version == version]
    if not fitting and not version:
        return None
    if not fitting:
        versions = ", ".join(str(checkpoint.version) for checkpoint in checkpoints) or "none"
        raise CannotRollBack(
            f"There is no checkpoint of policy version {version}; there are checkpoints of: {versions}. One is made "
            "every --save-interval steps and when the server stops; 0 is the base model."
        )
    try:
        verify(fitting[0].folder)
    except BadCheckpoint as error:
        raise CannotRollBack(str(error)) from error
    return fitting[0]


def roll_back_offline(ledger: OfflineLedger, checkpoints: Checkpoints, version: int | None) -> int:
    """Make an earlier checkpoint the newest one, so that the next start continues from it. Raises CannotRollBack.

    Returns its new policy version.
    """
    saved = checkpoints.all()
    chosen = choose_checkpoint(saved, version, saved[-1].step if saved else 0)
    if chosen is None:
        raise CannotRollBack(
            "There is no earlier checkpoint: only the base model is left to roll back to. Start the server with "
            "--resume-from-ckpt none, or roll back while it runs."
        )

    async def copy(folder: Path) -> None:
        for path in chosen.folder.iterdir():
            if path.name != RECORD:
                shutil.copy(path, folder / path.name)

    new = max(ledger.latest_version(), saved[-1].version) + 1
    asyncio.run(checkpoints.save(chosen.step, new, (), copy, replaced=chosen))
    ledger.roll_back(chosen.step)
    return new

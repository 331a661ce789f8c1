"""Takes what people's lines have in common into the shared line, if gate and guard find it no worse."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import RECORD, read_record, verify
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.ledger import training


class NotMerged(UserError):
    """The shared line is as it was; the message says why."""


async def merge_into(loop: LearnLoop, folder: Path) -> int:
    """Let the shared line serve and continue from an average of lines; the version under which it serves.

    The ledger knows then whose lines are in it, so that these can be forgotten. The policy before stays a checkpoint,
    and a rollback leads to it.
    Raises NotMerged, BadCheckpoint, EngineError, LedgerError and OSError.
    """
    await asyncio.to_thread(verify, folder)
    average, line = read_record(folder), loop.line
    if not average.merged:
        raise NotMerged(f"{folder} is not what 'openclaw-rl merge --lines' has written.")
    if line.ledger.read(training.versions_with_deleted_turns) & set(average.merged):
        raise NotMerged(f"{folder} has learned from turns that were deleted since: merge the lines again.")
    await loop.save()
    before = line.version
    version = await loop.hold(replace(average, versions=(before,)))
    await line.ledger.write(training.add_merged, version, average.merged)

    async def copy(target: Path) -> None:
        await asyncio.to_thread(shutil.copytree, folder, target, ignore=lambda *_: {RECORD}, dirs_exist_ok=True)

    try:
        if fault := await loop.find_fault(version):
            raise NotMerged(f"The shared line is as it was, because the average is worse: {fault}.")
        if line.version != before or line.lost:
            raise NotMerged("The shared line is as it was, because it has learned meanwhile: merge the lines again.")
        # Killed after this, the next start continues from it.
        saved = await line.checkpoints.save(line.step + 1, version, (), copy)
    finally:
        line.sampler.retract(version)
    return await loop.roll_back(saved)

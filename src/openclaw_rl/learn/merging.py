"""Takes what people's lines have in common into the shared line, if gate and guard find it no worse."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import Checkpoint, read_record, verify
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.ledger import training

AS_BEFORE = "The shared line is as it was, because"


class NotMerged(UserError):
    """The shared line is as it was; the message says why."""


async def merge_into(lines: Lines, folder: Path, is_gone: Callable[[], Awaitable[bool]]) -> int:
    """Let the shared line serve and continue from an average of lines; the version under which it serves.

    Guarantees:
    - The ledger knows whose lines are in it, so that these can be forgotten. What is forgotten meanwhile is not merged.
    - The policy before stays a checkpoint, and a rollback leads to it.
    - The shared line makes no step while the average is examined. Nothing else waits for that. A rollback, the end of
      the server and another average stop it.
    - Nothing is merged for a client that `is_gone` by then.

    Raises NotMerged, BadCheckpoint, EngineError, LedgerError and OSError.
    """
    await asyncio.to_thread(verify, folder)
    average, loop, line = read_record(folder), lines.shared, lines.shared.line
    check_parts(lines, average)
    loop.rests += 1
    try:
        await loop.save()
        before = line.version
        version = await loop.hold(replace(average, versions=(before,)))

        async def check() -> None:
            check_parts(lines, average)
            if line.version != before:
                raise NotMerged(f"{AS_BEFORE} it serves another policy meanwhile: merge the lines again.")
            if await is_gone():
                raise NotMerged(f"{AS_BEFORE} nobody waits for the answer any more.")

        try:
            await line.ledger.write(training.add_merged, version, average.merged)
            fault = await loop.find_fault(version)
            if fault is None:
                raise NotMerged(f"{AS_BEFORE} the examination was stopped: merge the lines again.")
            if fault:
                raise NotMerged(f"{AS_BEFORE} the average is worse: {fault}.")
            return await adopt(loop, replace(average, versions=(version,)), check)
        finally:
            line.sampler.retract(version)
    finally:
        loop.rests -= 1


def check_parts(lines: Lines, average: Checkpoint) -> None:
    """Raise NotMerged unless all that was averaged is there still, and the shared line has made all its steps."""
    folder, ledger = average.folder, lines.ledger
    if not average.merged:
        raise NotMerged(f"{folder} is not what 'openclaw-rl merge --lines' has written.")
    if not average.last_step_at or average.last_step_at != ledger.read(training.last_step_at, average.merged):
        raise NotMerged(f"{folder} has learned from lines of another run: merge the lines of this one.")
    if not ledger.read(training.lines_of, average.merged) <= set(lines.names()):
        raise NotMerged(f"{folder} has learned from a line that was deleted since: merge the lines again.")
    if ledger.read(training.versions_with_deleted_turns) & set(average.merged):
        raise NotMerged(f"{folder} has learned from turns that were deleted since: merge the lines again.")
    if lines.shared.line.lost:
        raise NotMerged("The shared line makes its last steps again, which a crash has lost: merge the lines later.")


async def adopt(loop: LearnLoop, average: Checkpoint, check: Callable[[], Awaitable[None]]) -> int:
    """Serve and continue from a copy of an average, unless `check` raises; the version under which it serves.

    If it fails, nothing has changed.
    """
    line, before = loop.line, loop.version
    async with loop.lock:
        await check()
        # Killed after this, the next start continues from it.
        saved = await line.save_copy(average.folder, average.version)
        try:
            # Again, because who forgets something after this finds the copy on the disk.
            await check()
            return await loop.go_back(saved, await line.begin_to_go_back(saved), retrain=False)
        except BaseException:
            if line.version == before:
                line.take_back()
                line.checkpoints.remove([saved])
            raise

"""Lines: beside the shared line of policies, one for each person. One learner makes the steps of all."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path

from openclaw_rl.aio import wait_at_most
from openclaw_rl.engines.base import EngineError
from openclaw_rl.engines.lines import LearnerOfLines, SamplerOfLines
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder, lines_on_disk
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import training
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.groups import waiting_by_line
from openclaw_rl.types import BASE_VERSION, SHARED, LineState, NextStep

log = logging.getLogger(__name__)


class Lines:
    """Makes the steps of all lines, one at a time.

    Guarantees:
    - A turn is in no step of another line than its own (`ledger.groups.LINE_OF`).
    - Whoever has waited longest with a full batch is next, so nobody is kept from learning by somebody who writes more.
    - Each line has versions, checkpoints, a gate, a guard and a recovery of its own; see `LearnLoop`. An error in one
      line pauses that line alone.
    - The learner holds at most `most` lines. One that makes room is saved first.
    - `drop` leaves nothing of a line in memory or on disk, and changes no other line.
    """

    def __init__(
        self,
        shared: LearnLoop,
        make: Callable[[str], LearnLoop],
        begin: Callable[[LearnLoop], Awaitable[None]],
        learner: LearnerOfLines,
        sampler: SamplerOfLines,
        run_dir: Path,
        most: int,
    ) -> None:
        """`make` builds the loop of a line, and `begin` lets it agree with what the line has on disk."""
        self.shared = shared
        self.settings = shared.settings
        self.ledger = shared.ledger
        self.run_dir = run_dir
        self.most = most
        self.loops = {SHARED: shared}
        """The lines that were opened since the start, those first that were in the learner least recently."""
        self._make = make
        self._begin = begin
        self._learner = learner
        self._sampler = sampler
        self._known = set(lines_on_disk(run_dir))
        self._opening = asyncio.Lock()
        self._arrivals = count()
        self._since: dict[str, int] = {}
        """When each line was first seen to be due since its last step, as a number that grows."""
        self._paused: dict[str, float] = {}
        """Until when no step of a line is tried, because one failed."""
        self._stopping = False
        shared.others_wait = partial(self._others_wait, SHARED)

    async def open(self, name: str) -> LearnLoop:
        """The loop of a line, which agrees with what the line has on disk. Raises EngineError, LedgerError, OSError."""
        if name not in self.loops:
            async with self._opening:
                if name not in self.loops:
                    loop = self._make(name)
                    loop.others_wait = partial(self._others_wait, name)
                    await self._begin(loop)
                    self.loops[name] = loop
        return self.loops[name]

    async def find(self, name: str) -> LearnLoop | None:
        """The loop of a line that has policies or turns to learn from; None if there is no such line."""
        known = name in self.loops or name in self._known or name in self.ledger.read(waiting_by_line)
        return await self.open(name) if known else None

    async def serve(self, name: str) -> None:
        """Let the sampler know the policy of a line, if it has one. A request for it need not wait for a step."""
        if name in self._known and name not in self.loops:
            await self.open(name)

    def names(self) -> list[str]:
        """All lines with policies, the shared one first."""
        return [SHARED, *sorted({*self._known, *self.loops} - {SHARED})]

    async def run(self) -> None:
        """Learn until cancelled."""
        try:
            # Of steps that a killed server was making. Their lines need not be open.
            await self.ledger.write(training.release_batches)
        except LedgerError as error:
            log.error("The turns of a step that did not end wait until their line is opened: %s", error)
        await self._open_unfinished()
        with self.ledger.watch() as changed:
            while True:
                changed.clear()
                try:
                    did = await self._take_turn()
                except LedgerError as error:
                    log.error("Learning waits for the ledger: %s", error)
                    did = False
                if not did:
                    await wait_at_most(self._patience(), changed.wait())

    async def _open_unfinished(self) -> None:
        """Open the lines whose last steps are not saved, so that these are made again. Others wait for their owners:
        there may be thousands, and opening one reads all its files."""
        try:
            saved = await asyncio.to_thread(lambda: {name: self._saved_version(name) for name in sorted(self._known)})
            self.shared.line.numbers.know(max(saved.values(), default=BASE_VERSION))
            made = self.ledger.read(training.newest_steps)
        except (LedgerError, OSError) as error:
            log.error("Lost steps are made again once their line is opened: %s", error)
            return
        for name in (name for name, version in saved.items() if made.get(name, BASE_VERSION) > version):
            try:
                # Meanwhile it may have been deleted.
                await self.serve(name)
            except (EngineError, LedgerError, OSError) as error:
                log.error("The line %s cannot be opened: %s", name, error)

    def _saved_version(self, name: str) -> int:
        states = Checkpoints.of_run(line_folder(self.run_dir, name), 1).states()
        return states[-1].version if states else BASE_VERSION

    async def _take_turn(self) -> bool:
        """Do what is due for the line that has waited longest; whether anything was."""
        # Read once: there may be many lines, and each is asked.
        waiting = self.ledger.read(waiting_by_line)
        for name in self._queue(waiting):
            loop: LearnLoop | None = None
            try:
                loop = await self.open(name)
                if not loop.is_due(*waiting.get(name, (0, 0))):
                    continue
                if await self._prepare(name, loop) and await loop.take_turn():
                    self._since.pop(name, None)
                    return True
            except (EngineError, LedgerError, OSError) as error:
                self._pause(name, error, loop)
                # Only turns that wait are counted, and these wait for the next trial.
                await self.ledger.write(training.release_batches, name)
        return False

    def _pause(self, name: str, error: Exception, loop: LearnLoop | None) -> None:
        """Try no step of a line for a while, because of an error."""
        pause = loop.suspend(error) if loop else self.settings.first_pause
        self._paused[name] = time.monotonic() + pause

    def _is_paused(self, name: str) -> bool:
        return self._paused.get(name, 0.0) > time.monotonic()

    def _queue(self, waiting: dict[str, tuple[int, int]]) -> list[str]:
        """The lines for which something may be due, those first that have waited longest."""
        if self._stopping:
            return []
        takes_less = self.settings.batch_timeout is not None
        due = {
            name
            for name, (turns, practised) in waiting.items()
            if turns >= self.settings.batch_size or practised or takes_less or self._has_lost(name)
        }
        due |= {name for name, loop in self.loops.items() if loop.phase is Phase.WAITING and loop.is_examination_due()}
        due = {name for name in due if not self._is_paused(name)}
        self._since = {name: since for name, since in self._since.items() if name in due}
        for name in sorted(due - self._since.keys()):
            self._since[name] = next(self._arrivals)
        return sorted(due, key=self._since.__getitem__)

    def _others_wait(self, name: str) -> bool:
        """Whether another line than this one has a full batch to learn from."""
        for other, (turns, _) in self.ledger.read(waiting_by_line).items():
            if other != name and turns >= self.settings.batch_size and not self._is_paused(other):
                loop = self.loops.get(other)
                if loop is None or loop.is_due(turns, 0):
                    return True
        return False

    def _has_lost(self, name: str) -> bool:
        return name in self.loops and bool(self.loops[name].line.lost)

    async def _prepare(self, name: str, loop: LearnLoop) -> bool:
        """Let the learner hold a line, and forget the ones that it held least recently if it holds too many.

        Whether it holds the line: there is no room while the others cannot be saved.
        """
        self.loops[name] = self.loops.pop(name)
        if loop.phase is Phase.WAITING:
            return True
        others = {other: one for other, one in self.loops.items() if one is not loop}
        held = {other: one for other, one in others.items() if one.phase is not Phase.UNPREPARED}
        excess = len(held) + 1 - self.most
        for other in sorted(held, key=self._is_paused):
            if excess > 0:
                excess -= await self._park(other, held[other])
        if excess > 0:
            self._paused[name] = time.monotonic() + self.settings.first_pause
            return False
        return await loop.prepare()

    async def _park(self, name: str, loop: LearnLoop) -> bool:
        """Save a line and let the learner forget it; whether it did. An error pauses that line alone."""
        try:
            await loop.park()
            await self._learner.drop_line(name)
            return True
        except (EngineError, LedgerError, OSError) as error:
            self._pause(name, error, loop)
            return False

    def _patience(self) -> float:
        """How many seconds to wait for a change of the ledger."""
        now = time.monotonic()
        until = [until - now for until in self._paused.values() if until > now]
        return min([self.settings.idle_seconds, *until, *(loop.patience() for loop in self.loops.values())])

    @property
    def _working(self) -> tuple[str, LearnLoop] | None:
        """The line whose step is being made, if there is one."""
        return next(((name, loop) for name, loop in self.loops.items() if loop.phase is Phase.TRAINING), None)

    def progress(self) -> NextStep | None:
        """The progress of the step that is made, or of the line whose batch is fullest."""
        working = self._working
        if working:
            return working[1].progress()
        waiting = self.ledger.read(waiting_by_line)
        name = max(waiting, key=lambda line: waiting[line][0], default=SHARED)
        loop = self.loops.get(name)
        step = loop.step if loop else 0
        return NextStep(step + 1, waiting.get(name, (0, 0))[0], self.settings.batch_size)

    def status(self) -> str:
        """What the next steps wait for, in words."""
        working = self._working
        if working:
            return f"training step {working[1].step + 1} of the line {working[0]}"
        troubled = [f"the line {name}: {loop.trouble}" for name, loop in self.loops.items() if loop.trouble]
        if troubled:
            return f"suspended: {troubled[0]}"
        state = self.progress()
        samples, needed = (state.samples, state.needed) if state else (0, 0)
        return f"{samples} of the {needed} judged turns that a step of one line needs (--batch-size)"

    def states(self) -> list[LineState]:
        """Where each line stands that has policies or turns to learn from, the shared one first."""
        waiting = self.ledger.read(waiting_by_line)
        names = dict.fromkeys([*self.names(), *sorted(waiting)])
        return [self._state(name, waiting.get(name, (0, 0))[0]) for name in names]

    def _state(self, name: str, waiting: int) -> LineState:
        loop = self.loops.get(name)
        guard = loop.guard.state.in_words() if loop and loop.guard else ""
        return LineState(
            name,
            self._sampler.newest_of(name),
            loop.line.served_step if loop else None,
            waiting,
            self.settings.batch_size,
            is_in_learner=loop is not None and loop.phase is not Phase.UNPREPARED,
            trouble=loop.trouble if loop else "",
            guard=guard,
        )

    def stop_step(self) -> None:
        """Take back the step that is being made, so that `finish` need not wait for its end."""
        if self._working:
            self._working[1].stop_step()

    async def finish(self) -> None:
        """Let the running step end, start no other, and save what no checkpoint holds yet."""
        self._stopping = True
        for loop in list(self.loops.values()):
            await loop.finish()

    async def drop(self, name: str) -> bool:
        """Delete a person's line for good; whether there was one. Their requests are served by the shared line."""
        async with self._opening:
            if name == SHARED or not (name in self.loops or name in self._known):
                return False
            # First, because the rest waits for the step that is being made.
            self._retract(name)
            if name in self.loops:
                await self.loops[name].leave()
                self._retract(name)
            await self._learner.drop_line(name)
            await self._learner.erase(line_folder(self.run_dir, name), self.run_dir)
            # Killed between these two, the next start continues the line, and makes none of its steps again.
            await self.ledger.write(training.follow, BASE_VERSION, line=name)
            await asyncio.to_thread(shutil.rmtree, line_folder(self.run_dir, name), ignore_errors=True)
            self.loops.pop(name, None)
            self._known.discard(name)
            self._paused.pop(name, None)
        return True

    def _retract(self, name: str) -> None:
        for version in self._sampler.versions_of(name):
            self._sampler.retract(version)

    async def retrain(self) -> int:
        """Learn again without deleted turns, in every line that was trained on some; see `LearnLoop.retrain`."""
        versions = self.ledger.read(training.versions_with_deleted_turns)
        for name in sorted(self.ledger.read(training.lines_of, versions) - {SHARED}):
            await (await self.open(name)).retrain()
        return await self.shared.retrain()

"""The loops in the background (judging, learning, the user's rollouts), and the API's operations on them."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from openclaw_rl.api.service import IsGone, OperationFailed, Operations
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.judge.loop import JudgeLoop
from openclaw_rl.judge.rules.wishes import topic_of
from openclaw_rl.learn.build import ServedLines
from openclaw_rl.learn.checkpoints import BadCheckpoint
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.merging import NotMerged, merge_into
from openclaw_rl.learn.outside import NothingToClaim, OutsideTraining
from openclaw_rl.learn.practiser import Practiser
from openclaw_rl.learn.rollback import CannotRollBack, choose_checkpoint
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.status import REMEMBERS, TEACH_OWN
from openclaw_rl.ledger.training import policy_line
from openclaw_rl.plugins import describe, load_plugin
from openclaw_rl.types import SHARED, Claim, LineState, NextStep

log = logging.getLogger(__name__)

ROLLOUT_OPTION = "--rollout-function-path"
ROLLOUT_NAMES = ("rollout",)


class BackgroundLoops(Operations):
    """The operations of a server that may judge, and learn or hand its turns to an outside trainer."""

    def __init__(
        self,
        judging: JudgeLoop | None,
        learning: LearnLoop | None,
        patience: float,
        outside: OutsideTraining | None = None,
        judge_model: Sampler | None = None,
        *,
        remembers: bool = False,
        lines: Lines | None = None,
        served_lines: ServedLines | None = None,
    ) -> None:
        """`judge_model` judges and teaches, if the policy's own sampler does not.

        With `remembers`, the model is behind another API, so nothing is trained. With `lines`, `learning` is that of
        the shared line. `served_lines` are those of a server that does not learn.
        """
        self.lines = lines
        self.served_lines = served_lines
        self.has_lines = lines is not None or served_lines is not None
        self.remembers = remembers
        self.judging = judging
        self.learning = learning
        self.outside = outside
        self.patience = patience
        self.judge_model = judge_model
        self.practiser: Practiser | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *others: Coroutine[Any, Any, None]) -> None:
        """Run the loops and other coroutines as tasks."""
        parts = (self.judging, self.lines or self.learning, self.outside, self.practiser)
        loops = [part.run() for part in parts if part is not None]
        self._tasks = [asyncio.create_task(work) for work in (*loops, *others)]
        for task in self._tasks:
            task.add_done_callback(report_end)

    async def stop(self) -> None:
        """Save a checkpoint, then cancel all tasks."""
        if self.learning is not None:
            await self._finish(self.lines or self.learning)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, learning: LearnLoop | Lines) -> None:
        """Let the running step end and save a checkpoint. A step that takes half of the time is taken back."""
        finishing = asyncio.create_task(learning.finish())
        await asyncio.wait([finishing], timeout=self.patience / 2)
        if not finishing.done():
            learning.stop_step()
        try:
            async with asyncio.timeout(self.patience / 2):
                await finishing
        except (TimeoutError, EngineError, LedgerError, OSError) as error:
            reason = str(error) or "there was no time"
            log.warning("No checkpoint was saved. The steps since the last one are made again: %s", reason)

    def judge(self) -> str:
        if self.judging is None:
            return "off"
        return f"suspended: {self.judging.down}" if self.judging.down else "on"

    def learner(self) -> str:
        try:
            training = self.lines or self.learning or self.outside
            return training.status() if training else REMEMBERS if self.remembers else "off"
        except LedgerError as error:
            return f"suspended: {error}"

    def where_learner_runs(self) -> str:
        return self.learning.line.learner.describe() if self.learning else ""

    def where_judge_runs(self) -> str:
        return self.judge_model.describe() if self.judge_model else ""

    def next_step(self) -> NextStep | None:
        try:
            training = self.lines or self.learning or self.outside
            return training.progress() if training else None
        except LedgerError:
            return None

    def guard(self) -> dict[str, Any] | None:
        watching = self.learning.guard if self.learning else None
        return watching.state.as_json() if watching else None

    def line_names(self) -> list[str]:
        return self.lines.names() if self.lines else self.served_lines.names if self.served_lines else [SHARED]

    async def serve_line(self, line: str) -> None:
        lines = self.lines or self.served_lines
        try:
            if lines is not None:
                await lines.serve(line)
        except (EngineError, LedgerError, ConfigError, OSError) as error:
            raise OperationFailed(f"The policy of the line {line} could not be loaded: {error}") from error

    def line_states(self) -> list[LineState]:
        return self.lines.states() if self.lines else []

    async def drop_line(self, line: str) -> bool:
        if self.lines is None:
            return await super().drop_line(line)
        try:
            return await self.lines.drop(line)
        except (EngineError, LedgerError, OSError) as error:
            raise OperationFailed(f"The line could not be deleted: {error}") from error

    async def merge(self, folder: Path, is_gone: IsGone) -> int:
        if self.lines is None:
            return await super().merge(folder, is_gone)
        try:
            return await merge_into(self.lines, folder, is_gone)
        except (NotMerged, BadCheckpoint, EngineError, LedgerError, OSError) as error:
            raise OperationFailed(str(error)) from error

    async def _loop_of(self, line: str) -> LearnLoop | None:
        """The loop of a line; None if this server does not learn. Raises OperationFailed if there is no such line."""
        if line == SHARED or self.learning is None:
            return self.learning
        try:
            found = await self.lines.find(line) if self.lines else None
        except (EngineError, LedgerError, OSError) as error:
            raise OperationFailed(f"The line {line} could not be opened: {error}") from error
        if found is None:
            raise OperationFailed(f"There is no line {line!r}: its owner has taught nothing yet.")
        return found

    async def relearn(self, line: str = SHARED) -> int:
        learning = await self._loop_of(line)
        if learning is None:
            return await super().relearn(line)
        try:
            return await learning.relearn()
        except LedgerError as error:
            raise OperationFailed(str(error)) from error

    async def topic_of(self, note: str) -> str:
        # In a thread, because the first note in a language has its phrases compiled.
        return await asyncio.to_thread(topic_of, note)

    def why_no_practice(self) -> str:
        if self.remembers:
            return f"The weights are elsewhere, so no notes are practised here. {TEACH_OWN}"
        if self.learning is None:
            return super().why_no_practice()
        return "" if self.practiser else "This server's sampler keeps no base model, so it practises no notes."

    async def roll_back(self, version: int | None, *, retrain: bool = False, line: str = SHARED) -> int:
        if self.outside is not None:
            raise OperationFailed(
                f"{self.outside.settings.trainer} trains this policy, so this server cannot roll it back: let the "
                "trainer push an earlier checkpoint."
            )
        learning = await self._loop_of(line)
        if learning is None:
            return await super().roll_back(version, retrain=retrain, line=line)
        try:
            if retrain:
                return await (self.lines or learning).retrain()
            lineage = learning.line
            made_from = lineage.ledger.read(policy_line, lineage.version)
            # Checking a checkpoint reads all its files.
            checkpoint = await asyncio.to_thread(
                choose_checkpoint, lineage.checkpoints.all(), version, lineage.served_step, made_from
            )
            return await learning.roll_back(checkpoint)
        except CannotRollBack as error:
            raise OperationFailed(str(error)) from error
        except (EngineError, LedgerError, OSError) as error:
            raise OperationFailed(f"The policy could not be loaded: {error}") from error

    async def hold(self, version: int) -> int:
        if self.learning is None:
            return await super().hold(version)
        try:
            checkpoints = self.learning.line.checkpoints.all()
            fitting = [checkpoint for checkpoint in checkpoints if version in checkpoint.versions]
            if not fitting:
                raise OperationFailed(f"There is no checkpoint of policy version {version} any more.")
            return await self.learning.hold(fitting[-1])
        except (EngineError, LedgerError, OSError) as error:
            raise OperationFailed(f"The policy could not be loaded: {error}") from error

    async def claim(
        self, count: int | None, lease_seconds: float | None, wait_seconds: float, is_gone: IsGone
    ) -> Claim:
        if self.outside is None:
            return await super().claim(count, lease_seconds, wait_seconds, is_gone)
        try:
            return await self.outside.claim(count, lease_seconds, wait_seconds, is_gone)
        except NothingToClaim as error:
            raise OperationFailed(str(error)) from error

    async def confirm(self, lease: str) -> int:
        if self.outside is None:
            return await super().confirm(lease)
        return await self.outside.confirm(lease)


def report_end(task: "asyncio.Task[None]") -> None:
    """Log the error of a task that fails."""
    if not task.cancelled() and (error := task.exception()):
        log.error("A background task has failed: %r", error, exc_info=error)


class Rollout:
    """Runs the user's `async rollout(base_url, config)` once, in the server's process, where it calls the API.

    Its end or its failure is logged and does not stop the server.
    What fails because the server stops is no failure.
    """

    def __init__(self, path: str, settings: dict[str, Any]) -> None:
        self.file = Path(path.partition(":")[0]).expanduser()
        self.settings = settings
        self.function = load_plugin(path, ROLLOUT_OPTION, ROLLOUT_NAMES)
        if not inspect.iscoroutinefunction(self.function):
            raise ConfigError(f"{ROLLOUT_OPTION} {path} is not an async function: async def rollout(base_url, config).")

    async def run(self, base_url: str, is_stopping: Callable[[], bool] = lambda: False) -> None:
        try:
            await self.function(base_url, self.settings)
        except Exception as error:
            if is_stopping():
                # A server that stops refuses the function's requests.
                log.info("The rollout has ended with the server.")
                return
            log.error("The rollout has failed: %s.", describe(error, self.file), exc_info=error)
        else:
            log.info("The rollout has ended.")

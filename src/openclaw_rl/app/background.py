"""The loops in the background (judging, learning, the user's rollouts), and the API's operations on them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from openclaw_rl.api.service import IsGone, OperationFailed, Operations
from openclaw_rl.app.assembly import Engines, judge_setup, learn_setup
from openclaw_rl.app.config import Config
from openclaw_rl.app.console import local_url, show_learning
from openclaw_rl.app.rollout_function import build_rollout
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.engines.lines import LearnerOfLines, SamplerOfLines
from openclaw_rl.engines.outside.options import OutsideOptions
from openclaw_rl.engines.remote.outside_weights import OutsideWeightsSampler
from openclaw_rl.judge.build import JudgingModel, build_loop
from openclaw_rl.judge.loop import JudgeLoop
from openclaw_rl.judge.rules.kept import keeps
from openclaw_rl.judge.rules.wishes import topic_of
from openclaw_rl.learn.build import (
    ServedLines,
    build_learning,
    build_lines,
    build_practice,
    serve_learned,
    where_to_begin,
)
from openclaw_rl.learn.checkpoints import BadCheckpoint
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.merging import NotMerged, merge_into
from openclaw_rl.learn.outside import NothingToClaim, OutsideSettings, OutsideTraining
from openclaw_rl.learn.practiser import Practiser
from openclaw_rl.learn.rollback import CannotRollBack, choose_checkpoint
from openclaw_rl.learn.samples import score_imported
from openclaw_rl.ledger import episodes
from openclaw_rl.ledger.errors import CaptureSuspended, LedgerError
from openclaw_rl.ledger.status import REMEMBERS, TEACH_OWN
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import add_weights, latest_version, policy_line
from openclaw_rl.terminal import log_console, on_terminal
from openclaw_rl.types import BASE_VERSION, SHARED, Claim, LineState, NextStep

log = logging.getLogger(__name__)

#: The longest delay between a session's time-out and its end.
MAX_SWEEP_SECONDS = 30.0


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


async def build_loops(
    stack: contextlib.AsyncExitStack,
    engines: Engines,
    ledger: Ledger | None,
    policy: JudgingModel,
    other: JudgingModel | None,
    registry: CollectorRegistry,
) -> BackgroundLoops:
    """Build the loops for judging and learning, and publish the newest policy."""
    config = engines.config
    judging = build_loop(judge_setup(config), ledger, policy, other, registry) if ledger else None
    judge_model = other.sampler if other else None
    patience = config.server.shutdown_seconds
    if config.engine.trains_outside:
        outside = await begin_outside(config, ledger, policy.sampler)
        return BackgroundLoops(judging, None, patience, outside, judge_model)
    if config.engine.takes_text:
        return BackgroundLoops(judging, None, patience, remembers=True)
    if ledger is None or not config.learns:
        places = config.training, config.run.folder, config.ledger_dir
        has_lines = config.engine.policy_per_user
        served = ServedLines(*places, cast(SamplerOfLines, policy.sampler)) if has_lines else None
        await serve_learned(*places, policy.sampler)
        return BackgroundLoops(judging, None, patience, None, judge_model, served_lines=served)
    learner = engines.open_learner()
    # A server of another project says only now what it can do.
    config.learning_method.check_learner(learner.capabilities)
    stack.push_async_callback(learner.close)
    setup, lines = learn_setup(config), None
    if config.engine.policy_per_user:
        # `check_lines` has refused engines without lines.
        engine = cast(LearnerOfLines, learner), cast(SamplerOfLines, policy.sampler)
        lines = build_lines(setup, ledger, *engine, policy.chat_renderer, registry)
        learning = lines.shared
    else:
        learning = build_learning(setup, ledger, learner, policy.sampler, policy.chat_renderer, registry)
    beginning = await asyncio.to_thread(where_to_begin, config.training, config.run.folder)
    await learning.line.begin(beginning.checkpoint, of_this_run=beginning.of_this_run)
    loops = BackgroundLoops(judging, learning, patience, None, judge_model, lines=lines)
    if config.notes.notes:
        loops.practiser = build_practice(setup, ledger, learning, policy.sampler, policy.chat_renderer, keeps, lines)
    return loops


async def begin_outside(config: Config, ledger: Ledger | None, sampler: Sampler) -> OutsideTraining | None:
    """Number the weights of an outside trainer. If turns are judged, also hand them to it."""
    assert isinstance(sampler, OutsideWeightsSampler)
    if ledger is None:
        await sampler.begin(BASE_VERSION)
        return None

    def note_weights(version: int, parent: int, label: str) -> None:
        # Not awaited: it is written before each change that is submitted after it.
        ledger.submit(add_weights, version, parent, label)

    await sampler.begin(ledger.read(latest_version), note_weights)
    training = config.training
    engines = config.engine_settings
    settings = OutsideSettings(
        trainer=config.learner.name,
        batch_size=training.batch_size,
        max_steps=training.max_steps,
        max_staleness=training.max_staleness,
        lease_seconds=engines.section(OutsideOptions).lease_seconds,
    )
    return OutsideTraining(ledger, config.learning_method, settings, sampler) if config.learns else None


def background_work(
    config: Config,
    ledger: Ledger | None,
    loops: BackgroundLoops,
    sampler: Sampler,
    port: int,
    is_stopping: Callable[[], bool],
) -> list[Coroutine[Any, Any, None]]:
    """The coroutines that run along with judging and learning until the server stops."""
    work = [end_idle_sessions(ledger, config.capture.session_timeout)] if ledger else []
    training = loops.lines or loops.learning or loops.outside
    if training is not None and ledger is not None:
        line = SHARED if loops.lines else None
        top = config.learning_method.recorded_top
        work.append(score_imported(ledger, sampler, config.training.batch_size, top, line=line))
        if on_terminal(stderr=True):
            work.append(show_learning(training, log_console))
    rollout = build_rollout(config)
    if rollout is not None:
        work.append(rollout.run(local_url(config.server, port) + "/v1", is_stopping))
    return work


async def end_idle_sessions(ledger: Ledger, timeout: float) -> None:
    """Close sessions that have been idle for `timeout` seconds, until the server stops."""
    while True:
        await asyncio.sleep(min(MAX_SWEEP_SECONDS, timeout / 4))
        try:
            closed = await ledger.write(episodes.close_idle, timeout)
        except CaptureSuspended:
            continue  # the ledger's writer logs when it stops and when it can write again
        if closed:
            log.debug("Closed %d idle sessions.", closed)

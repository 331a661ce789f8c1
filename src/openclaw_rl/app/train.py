"""Trains on files of trajectories without serving: import, judge, and make steps until nothing is left."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from openclaw_rl.aio import wait_at_most
from openclaw_rl.app.assembly import Engines, start_model, start_other_model
from openclaw_rl.app.background import BackgroundLoops, build_loops
from openclaw_rl.app.checks import check, lock_folders, prepare_folders
from openclaw_rl.app.config import Config
from openclaw_rl.app.console import TurnsBar
from openclaw_rl.app.http_server import event_loop
from openclaw_rl.app.split import check_seen
from openclaw_rl.app.startup_signals import Start
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineError
from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import Checkpoint
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.samples import score_imported
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import groups, training, turns, verdicts
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.lessons import import_run
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.trajectories import Imported, import_file
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.terminal import log_console, start_logging
from openclaw_rl.types import Counts, State

log = logging.getLogger(__name__)

#: Turns are scored while a step is made, and a step can leave some for the next one.
MIN_STALENESS = 2
#: A phase of the learner can end without a change of the ledger, so it is looked at this often.
POLL_SECONDS = 0.2
#: The pause after a checkpoint could not be written.
RETRY_SECONDS = 5.0
#: The states of turns that may still be trained on.
UNDER_WAY = (State.CAPTURED, State.READY, State.JUDGED, State.BATCHED)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What became of the turns."""

    imported: Imported
    counts: Counts
    judged: int
    steps: int
    """The steps that this command made."""
    checkpoint: Checkpoint | None
    """The newest one."""
    why_unfinished: str
    """Why turns are left that could be trained on; empty if there are none."""


def check_training(config: Config) -> None:
    """Check the options of training without a server, before anything is loaded. Raises UserError."""
    if not config.learns:
        raise ConfigError("Nothing would be trained: leave out --no-capture, --judge none and --max-steps 0.")
    if config.engine.trains_outside:
        raise ConfigError(
            f"--learner {config.learner.name} trains outside this program, so it needs a server: use openclaw-rl serve."
        )
    if config.training.max_staleness < MIN_STALENESS:
        raise ConfigError(
            f"--max-staleness must be {MIN_STALENESS} or more here: turns are scored while the step before theirs is "
            "made."
        )
    if config.engine.policy_per_user:
        # It would train people's waiting turns into the shared line.
        raise ConfigError("Here one line learns from all turns: give --no-policy-per-user, or another --run-dir.")
    check(config)


def train(config: Config, files: Sequence[Path], epochs: int, start: Start) -> TrainingResult:
    """Train on files until nothing is left. Raises UserError, and KeyboardInterrupt after a signal.

    - Killed at any time, the same call goes on where it was: turns are imported once, and each is trained on once in
      each epoch. After a signal, the running step ends and a checkpoint is saved.
    - Other turns of the run that wait for a judge or a step are judged and trained on too.
    """
    start_logging(config.run.log_level)
    check_training(config)
    check_seen(config)
    try:
        with contextlib.ExitStack() as stack:
            lock_folders(stack, config)
            folder = prepare_folders(config)
            imported = import_files(config.ledger_dir, files, ChatRenderer(folder))
            # No further attempt comes, so groups that are not complete need not wait for any.
            ledger = stack.enter_context(
                contextlib.closing(Ledger(config.ledger_dir, config.capture.group_size, group_timeout=0))
            )
            before = ledger.read(turns.counts).step
            runner = stack.enter_context(asyncio.Runner(loop_factory=event_loop))
            why_unfinished = runner.run(begin(config, folder, ledger, epochs, start))
        with open_ledger(config.ledger_dir) as db:
            counts = turns.counts(db)
            judged = sum(of_source.total for of_source in verdicts.counts(db))
    except (EngineError, LedgerError) as error:
        raise UserError(str(error)) from None
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    newest = config.checkpoints.all()[-1:]
    return TrainingResult(imported, counts, judged, counts.step - before, newest[0] if newest else None, why_unfinished)


def import_files(ledger_dir: Path, files: Sequence[Path], renderer: ChatRenderer) -> Imported:
    """Import all files, and what runs teach; what they brought together."""
    total = Imported()
    with open_ledger(ledger_dir, create_missing=True) as db:
        for file in files:
            result = import_run(db, file, renderer) if file.is_dir() else import_file(db, file, renderer)
            total.turns += result.turns
            total.known += result.known
            total.errors += result.errors
    return total


async def begin(config: Config, folder: Path, ledger: Ledger, epochs: int, start: Start) -> str:
    start.enter_loop()
    async with contextlib.AsyncExitStack() as stack:
        loops = await start_loops(stack, config, folder, ledger)
        assert loops.learning is not None
        bar = TurnsBar(log_console)
        with bar.progress:
            return await run_epochs(ledger, loops.learning, epochs, bar)


async def start_loops(
    stack: contextlib.AsyncExitStack, config: Config, folder: Path, ledger: Ledger
) -> BackgroundLoops:
    """Start the engines and the loops that score, judge and learn, as in a server. The stack stops them."""
    engines = Engines(stack, config, folder)
    log.info("Loading %s …", config.policy_name)
    policy = await start_model(stack, engines.sampler, folder)
    method = config.learning_method
    # A server of another project says only now what it can do.
    method.check_sampler(engines.sampler.capabilities)
    other = await start_other_model(stack, engines, policy)
    loops = await build_loops(stack, engines, ledger, policy, other, CollectorRegistry())
    stack.push_async_callback(loops.stop)
    loops.start(score_imported(ledger, engines.sampler, config.training.batch_size, method.recorded_top))
    return loops


async def run_epochs(ledger: Ledger, learning: LearnLoop, epochs: int, bar: TurnsBar) -> str:
    """Go through all imported turns `epochs` times. Returns why turns are left; empty if none are."""
    for epoch in range(1, epochs + 1):
        await ledger.write(training.begin_epoch, epoch)
        total = under_way(ledger)
        name = f"epoch {epoch} of {epochs}"

        def show(total: int = total, name: str = name) -> None:
            bar.show(f"{name}, step {learning.step}", total - under_way(ledger), total)

        while True:
            await work_off(ledger, learning, show)
            try:
                # Lost steps of an epoch could not be made again in the next one, so the epoch is saved before that.
                await learning.save()
                break
            except (EngineError, OSError) as error:
                log.warning("The checkpoint of epoch %d is tried again: %s", epoch, error)
                await asyncio.sleep(RETRY_SECONDS)
        if learning.waits_for_good_score and (left := under_way(ledger)):
            return f"{left} turns are left, because the guard went back and waits for one with a good score"
        if learning.progress() is None and (left := under_way(ledger)):
            return f"{left} turns are left, because --max-steps {learning.settings.max_steps} have been made"
    return ""


async def work_off(ledger: Ledger, learning: LearnLoop, show: Callable[[], None]) -> None:
    """Return when all turns are scored, judged and trained on, or when the last step was made."""
    with ledger.watch() as changed:
        while True:
            changed.clear()
            with contextlib.suppress(LedgerError):
                show()
                comes = more_to_come(ledger)
                learning.accept_small_batches(not comes)
                trainable = ledger.read(groups.trainable, learning.line.takes)
                has_more = comes or (trainable and not learning.waits_for_good_score)
                is_over = learning.progress() is None or not has_more
                if is_over and learning.phase is Phase.WAITING:
                    return
            await wait_at_most(POLL_SECONDS, changed.wait())


def more_to_come(ledger: Ledger) -> bool:
    """Whether turns wait to be scored, judged or settled before they can be trained on."""
    return (
        ledger.read(turns.first_unscored) is not None
        or ledger.read(groups.queue).to_judge > 0
        or ledger.read(groups.any_to_settle, time.time() - ledger.group_timeout)
        or ledger.read(verdicts.any_unsettled)
    )


def under_way(ledger: Ledger) -> int:
    """How many turns may still be trained on."""
    states = ledger.read(turns.counts).states
    return sum(states[state] for state in UNDER_WAY)

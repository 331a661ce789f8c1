"""Builds the learning loop from the options, and checks them before anything starts."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Learner, Sampler, policy_in
from openclaw_rl.engines.lines import LearnerOfLines, LineSampler, SamplerOfLines
from openclaw_rl.learn.checkpoints import (
    BadCheckpoint,
    Checkpoint,
    Checkpoints,
    Policies,
    line_folder,
    lines_on_disk,
    read_record,
    verify,
)
from openclaw_rl.learn.gate import Gate, read_items
from openclaw_rl.learn.guard import FILE as GUARD_FILE
from openclaw_rl.learn.guard import Guard
from openclaw_rl.learn.lineage import Budget, LineOptions, VersionNumbers
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.plain_answers import own_prompts
from openclaw_rl.learn.practice_teacher import Keeps
from openclaw_rl.learn.practiser import PracticeSettings, Practiser
from openclaw_rl.learn.reporting import (
    METRICS_FILE,
    RECORDS_FILE,
    JsonLines,
    LineSteps,
    Prometheus,
    Records,
    Reporter,
    Sink,
    TensorBoard,
    WeightsAndBiases,
)
from openclaw_rl.learn.step import LearnSettings
from openclaw_rl.ledger.errors import LedgerUnusable
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import latest_version, steps_after
from openclaw_rl.methods.base import Method
from openclaw_rl.plugins import LOSS_NAMES, LOSS_OPTION, check_plugin
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, SHARED

#: Policies kept on disk besides those that an engine holds: the one being written and its predecessor.
SPARE_POLICIES = 2


@dataclass(frozen=True, slots=True)
class LearnSetup:
    """What the learning loop is built from."""

    options: TrainingOptions
    run_dir: Path
    method: Method
    policies_held: int
    values: Mapping[str, Any]
    """All options of the server, for the services that receive metrics."""
    seed: int
    several_users: bool
    personal: bool
    """Whether notes of one of several users are taught (--distil-personal)."""


def build_learning(
    setup: LearnSetup,
    ledger: Ledger,
    learner: Learner,
    sampler: Sampler,
    renderer: ChatRenderer,
    registry: CollectorRegistry,
) -> LearnLoop:
    """Build the learning loop of a server. Raises ConfigError."""
    watch = GuardWatch(registry) if setup.options.guard else None
    return build_line(setup, ledger, learner, sampler, renderer, Reporter(sinks(setup, registry)), watch)


@dataclass(frozen=True, slots=True)
class GuardWatch:
    """What the guards of a server share."""

    registry: CollectorRegistry | None
    """Where the guard of the shared line shows its numbers."""
    budget: Budget = field(default_factory=Budget)


def build_line(
    setup: LearnSetup,
    ledger: Ledger,
    learner: Learner,
    sampler: Sampler,
    renderer: ChatRenderer,
    reporter: Reporter,
    watch: GuardWatch | None,
    line: LineOptions | None = None,
    lock: asyncio.Lock | None = None,
) -> LearnLoop:
    """Build the learning loop of a line; without `line`, of all turns. Raises ConfigError."""
    options = setup.options
    line = line or LineOptions()
    folder = line_folder(setup.run_dir, line.name)
    held = setup.policies_held if line.owner is None else 1
    guard = None
    if watch is not None:
        prompts = partial(own_prompts, ledger, line.owner)
        registry = watch.registry if line.owner is None else None
        guard = Guard(folder / GUARD_FILE, sampler, renderer, prompts, registry, budget=watch.budget)
    return LearnLoop(
        ledger,
        learner,
        sampler,
        setup.method,
        LearnSettings(
            batch_size=options.batch_size,
            max_steps=options.max_steps,
            max_staleness=options.max_staleness,
            batch_timeout=options.batch_timeout,
            save_interval=options.save_interval,
        ),
        Checkpoints.of_run(folder, options.keep_checkpoints),
        Policies.of_run(folder, held + SPARE_POLICIES),
        reporter,
        Gate(read_items(options.gate), options.gate_margin, sampler, renderer) if options.gate else None,
        Records(setup.run_dir / RECORDS_FILE) if setup.method.options.record else None,
        guard,
        line,
        lock,
    )


def build_lines(
    setup: LearnSetup,
    ledger: Ledger,
    learner: LearnerOfLines,
    sampler: SamplerOfLines,
    renderer: ChatRenderer,
    registry: CollectorRegistry,
) -> Lines:
    """Build the loops of a server on which each person has a line. Raises ConfigError."""
    lock, numbers = asyncio.Lock(), VersionNumbers(ledger)
    received = sinks(setup, registry)
    steps = LineSteps(registry)
    watch = GuardWatch(registry) if setup.options.guard else None
    parts = (setup, ledger)

    def make(name: str) -> LearnLoop:
        folder = line_folder(setup.run_dir, name)
        if name == SHARED:
            reporter = Reporter([*received, steps.of_line(name)], name)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            prometheus = [sink for sink in received if isinstance(sink, Prometheus)]
            reporter = Reporter([JsonLines(folder / METRICS_FILE), *prometheus, steps.of_line(name)], name)
        origin = None if name == SHARED else partial(newest_policy, setup.run_dir)
        line = LineOptions(name, name, numbers, origin)
        own = LineSampler(sampler, name)
        return build_line(*parts, learner.for_line(name), own, renderer, reporter, watch, line, lock)

    async def begin(loop: LearnLoop) -> None:
        start = setup.options.resume_from_ckpt
        # A folder that was named is a checkpoint of the shared line.
        options = setup.options.model_copy(update={"resume_from_ckpt": start if start == "none" else "auto"})
        beginning = await asyncio.to_thread(where_to_begin, options, line_folder(setup.run_dir, loop.line.name))
        await loop.line.begin(beginning.checkpoint, of_this_run=beginning.of_this_run)

    return Lines(make(SHARED), make, begin, learner, sampler, setup.run_dir, setup.policies_held)


def newest_policy(run_dir: Path) -> Checkpoint | None:
    """The last state of the shared line that was saved; None if it is the base model."""
    latest = Checkpoints.of_run(run_dir, 1).latest()
    return None if latest is None or latest.is_base_model else latest


def build_practice(
    setup: LearnSetup,
    ledger: Ledger,
    loop: LearnLoop,
    sampler: Sampler,
    renderer: ChatRenderer,
    keeps: Keeps,
    lines: Lines | None = None,
) -> Practiser | None:
    """Build what practises notes; None if the sampler cannot ask the base model while a policy serves."""
    if not sampler.capabilities.keeps_base:
        return None
    options = setup.options
    settings = PracticeSettings(
        automatic=options.practice,
        steps=options.practice_steps,
        idle_seconds=options.practice_idle,
        on_policy=options.practice_form == "distil",
        several_users=setup.several_users,
        personal=setup.personal,
        seed=setup.seed,
    )

    async def line_of(owner: str) -> tuple[LearnLoop, Sampler]:
        assert lines is not None
        own = await lines.open(owner)
        return own, own.line.sampler

    return Practiser(ledger, loop, sampler, renderer, keeps, settings, line_of if lines else None)


def sinks(setup: LearnSetup, registry: CollectorRegistry) -> list[Sink]:
    """The receivers of step reports."""
    options = setup.options
    run_dir = setup.run_dir
    wanted: list[Sink] = [JsonLines(run_dir / METRICS_FILE), Prometheus(registry, setup.method.metric_names)]
    if options.tensorboard:
        wanted.append(TensorBoard(run_dir / "tensorboard"))
    if options.wandb_project:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in setup.values.items()}
        wanted.append(WeightsAndBiases(options.wandb_project, run_dir, values))
    return wanted


def check_learning(options: TrainingOptions) -> None:
    """Check the user's files and the optional packages before a model is loaded. Raises ConfigError."""
    if options.gate:
        read_items(options.gate)
    if options.tensorboard:
        TensorBoard.check()
    if options.wandb_project:
        WeightsAndBiases.check()
    if options.custom_loss_function_path:
        check_plugin(options.custom_loss_function_path, LOSS_OPTION, LOSS_NAMES)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where learning starts."""

    checkpoint: Checkpoint | None
    of_this_run: bool
    """Whether it continues this run. Otherwise it starts from another run's checkpoint or from the base model."""


class ServedLines:
    """The lines of a server that does not learn. The policy of one is published when it is first needed: there may be
    thousands, and publishing reads all its files."""

    def __init__(self, options: TrainingOptions, run_dir: Path, ledger_dir: Path, sampler: SamplerOfLines) -> None:
        # A folder that was named is a checkpoint of the shared line.
        self._places = options.model_copy(update={"resume_from_ckpt": "auto"}), run_dir, ledger_dir
        self._sampler = sampler
        found = lines_on_disk(run_dir) if options.resume_from_ckpt != "none" else []
        self.names = [SHARED, *found]
        self._unserved = set(found)
        self._serving = asyncio.Lock()

    async def serve(self, name: str) -> None:
        """Let the sampler know the policy of a line, if it has one. Raises UserError, EngineError, OSError."""
        async with self._serving:
            if name in self._unserved:
                await serve_learned(*self._places, LineSampler(self._sampler, name), name)
                self._unserved.discard(name)


async def serve_learned(
    options: TrainingOptions, run_dir: Path, ledger_dir: Path, sampler: Sampler, line: str = SHARED
) -> None:
    """Publish the policy of a line that --resume-from-ckpt selects, for a server that does not learn.

    With auto it is the policy that served last. One of another run has a number that no policy of this run has.
    """
    run_dir = line_folder(run_dir, line)
    beginning = await asyncio.to_thread(where_to_begin, options, run_dir)
    checkpoint = beginning.checkpoint
    version, folder = (checkpoint.version, checkpoint.folder) if checkpoint else (BASE_VERSION, None)
    if checkpoint and not beginning.of_this_run:
        with contextlib.suppress(LedgerUnusable), open_ledger(ledger_dir, readonly=True) as db:
            version = latest_version(db) + 1
    if options.resume_from_ckpt == "auto":
        policies = Policies(run_dir / "policies", SPARE_POLICIES)
        with contextlib.suppress(LedgerUnusable), open_ledger(ledger_dir, readonly=True) as db:
            newest = max((state.version for state in Checkpoints.of_run(run_dir, 1).states()), default=BASE_VERSION)
            for batch in steps_after(db, newest, line):
                if policies.folder_of(batch.version).is_dir():
                    version = batch.version
                    folder = policies.folder_of(batch.version)
    if folder is not None:
        await sampler.publish(version, policy_in(folder))


def where_to_begin(options: TrainingOptions, run_dir: Path) -> Beginning:
    """Resolve --resume-from-ckpt. Raises ConfigError if it names a folder that cannot be used."""
    given = options.resume_from_ckpt
    checkpoints = Checkpoints.of_run(run_dir, options.keep_checkpoints)
    if given == "none":
        return Beginning(None, of_this_run=False)
    if given == "auto":
        latest = checkpoints.latest()
        return Beginning(None if latest and latest.is_base_model else latest, of_this_run=True)
    folder = Path(given).expanduser().resolve()
    try:
        verify(folder)
        return Beginning(read_record(folder), of_this_run=folder.parent == checkpoints.folder.resolve())
    except BadCheckpoint as error:
        raise ConfigError(f"--resume-from-ckpt: {error}") from error

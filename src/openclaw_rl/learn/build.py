"""Builds the learning loop from the options, and checks them before anything starts."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Learner, Sampler, policy_in
from openclaw_rl.learn.checkpoints import BadCheckpoint, Checkpoint, Checkpoints, Policies, read_record, verify
from openclaw_rl.learn.gate import Gate, read_items
from openclaw_rl.learn.guard import FILE as GUARD_FILE
from openclaw_rl.learn.guard import Guard
from openclaw_rl.learn.loop import LearnLoop, LearnSettings
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.plain_prompts import own_prompts
from openclaw_rl.learn.practice_teacher import Keeps
from openclaw_rl.learn.practiser import PracticeSettings, Practiser
from openclaw_rl.learn.reporting import (
    RECORDS_FILE,
    JsonLines,
    Prometheus,
    Records,
    Reporter,
    Sink,
    TensorBoard,
    WeightsAndBiases,
)
from openclaw_rl.ledger.errors import LedgerUnusable
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import steps_after
from openclaw_rl.methods.base import Method
from openclaw_rl.plugins import LOSS_NAMES, LOSS_OPTION, check_plugin
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION

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
    options = setup.options
    run_dir = setup.run_dir
    method = setup.method
    gate = Gate(read_items(options.gate), options.gate_margin, sampler, renderer) if options.gate else None
    watch = Guard(run_dir / GUARD_FILE, sampler, renderer, partial(own_prompts, ledger), registry)
    settings = LearnSettings(
        batch_size=options.batch_size,
        max_steps=options.max_steps,
        max_staleness=options.max_staleness,
        batch_timeout=options.batch_timeout,
        save_interval=options.save_interval,
    )
    return LearnLoop(
        ledger,
        learner,
        sampler,
        method,
        settings,
        Checkpoints.of_run(run_dir, options.keep_checkpoints),
        Policies.of_run(run_dir, setup.policies_held + SPARE_POLICIES),
        Reporter(sinks(setup, registry)),
        gate,
        Records(run_dir / RECORDS_FILE) if method.options.record else None,
        watch if options.guard else None,
    )


def build_practice(
    setup: LearnSetup, ledger: Ledger, loop: LearnLoop, sampler: Sampler, renderer: ChatRenderer, keeps: Keeps
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
    return Practiser(ledger, loop, sampler, renderer, keeps, settings)


def sinks(setup: LearnSetup, registry: CollectorRegistry) -> list[Sink]:
    """The receivers of step reports."""
    options = setup.options
    run_dir = setup.run_dir
    wanted: list[Sink] = [JsonLines(run_dir / "metrics.jsonl"), Prometheus(registry, setup.method.metric_names)]
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


async def serve_learned(options: TrainingOptions, run_dir: Path, ledger_dir: Path, sampler: Sampler) -> None:
    """Publish the policy that --resume-from-ckpt selects, for a server that does not learn.

    With auto it is the policy that served last.
    """
    checkpoint = (await asyncio.to_thread(where_to_begin, options, run_dir)).checkpoint
    version, folder = (checkpoint.version, checkpoint.folder) if checkpoint else (BASE_VERSION, None)
    if options.resume_from_ckpt == "auto":
        policies = Policies(run_dir / "policies", SPARE_POLICIES)
        with contextlib.suppress(LedgerUnusable), open_ledger(ledger_dir, readonly=True) as db:
            newest = max((state.version for state in Checkpoints.of_run(run_dir, 1).states()), default=BASE_VERSION)
            for batch in steps_after(db, newest):
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

"""Makes learning from the options, and finds what is wrong with them before anything starts."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Learner, Sampler
from openclaw_rl.engines.policy_ref import policy_in
from openclaw_rl.learn import records
from openclaw_rl.learn.checkpoints import BadCheckpoint, Checkpoint, Checkpoints, read_record, verify
from openclaw_rl.learn.gate import Gate, read_items
from openclaw_rl.learn.loop import LearnLoop, LearnSettings
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.policies import Policies
from openclaw_rl.learn.reporting import JsonLines, Prometheus, Reporter, Sink, TensorBoard, WeightsAndBiases
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.methods.base import Method
from openclaw_rl.plugins import LOSS_NAMES, LOSS_OPTION, check_plugin
from openclaw_rl.rendering.chat import ChatRenderer

#: Policies kept on disk beside those that an engine holds: the one being written and the one before it.
SPARE_POLICIES = 2


@dataclass(frozen=True, slots=True)
class LearnSetup:
    """What learning is made from."""

    options: TrainingOptions
    run_dir: Path
    method: Method
    policies_held: int
    values: Mapping[str, Any]
    """All options of the server, for those who look at the metrics."""


def build_learning(
    setup: LearnSetup,
    ledger: Ledger,
    learner: Learner,
    sampler: Sampler,
    renderer: ChatRenderer,
    registry: CollectorRegistry,
) -> LearnLoop:
    """The learning of a server. Raises ConfigError."""
    options, run_dir, method = setup.options, setup.run_dir, setup.method
    gate = Gate(read_items(options.gate), options.gate_margin, sampler, renderer) if options.gate else None
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
        Policies(run_dir / "policies", setup.policies_held + SPARE_POLICIES),
        Reporter(sinks(setup, registry)),
        gate,
        records.Records(run_dir / records.FILE) if method.options.record else None,
    )


def sinks(setup: LearnSetup, registry: CollectorRegistry) -> list[Sink]:
    """Where reports of steps go."""
    options, run_dir = setup.options, setup.run_dir
    wanted: list[Sink] = [JsonLines(run_dir / "metrics.jsonl"), Prometheus(registry, setup.method.metric_names)]
    if options.tensorboard:
        wanted.append(TensorBoard(run_dir / "tensorboard"))
    if options.wandb_project:
        wanted.append(WeightsAndBiases(options.wandb_project, run_dir, setup.values))
    return wanted


def check_learning(options: TrainingOptions) -> None:
    """Find what is wrong with the owner's files and packages before a model is loaded. Raises ConfigError."""
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
    """Where learning begins."""

    checkpoint: Checkpoint | None
    own: bool
    """Whether it continues this run. If not, it begins a new line, from another run's checkpoint or the base model."""


async def serve_learned(options: TrainingOptions, run_dir: Path, sampler: Sampler) -> None:
    """Serve what was learned before, with learning off."""
    checkpoint = (await asyncio.to_thread(where_to_begin, options, run_dir)).checkpoint
    if checkpoint is not None:
        await sampler.publish(checkpoint.version, policy_in(checkpoint.folder))


def where_to_begin(options: TrainingOptions, run_dir: Path) -> Beginning:
    """What --resume-from-ckpt means. Raises ConfigError if it is a folder that cannot be used."""
    given, checkpoints = options.resume_from_ckpt, Checkpoints.of_run(run_dir, options.keep_checkpoints)
    if given == "none":
        return Beginning(None, own=False)
    if given == "auto":
        return Beginning(checkpoints.latest(), own=True)
    folder = Path(given).expanduser().resolve()
    try:
        verify(folder)
        return Beginning(read_record(folder), own=folder.parent == checkpoints.folder.resolve())
    except BadCheckpoint as error:
        raise ConfigError(f"--resume-from-ckpt: {error}") from error

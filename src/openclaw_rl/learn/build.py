"""Learning, from the options; what can be wrong with them is said before anything starts."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from openclaw_rl.app.config import Config
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Learner, Sampler
from openclaw_rl.engines.policy_ref import policy_in
from openclaw_rl.learn import records
from openclaw_rl.learn.checkpoints import BadCheckpoint, Checkpoint, Checkpoints, read_record, verify
from openclaw_rl.learn.gate import Gate, read_items
from openclaw_rl.learn.loop import LearnLoop, LearnSettings
from openclaw_rl.learn.methods import Weights
from openclaw_rl.learn.policies import Policies
from openclaw_rl.learn.reporting import JsonLines, Prometheus, Reporter, Sink, TensorBoard, WeightsAndBiases
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.plugins import LOSS_NAMES, LOSS_OPTION, check_plugin
from openclaw_rl.rendering.chat import ChatRenderer

#: Beside those that an engine holds: one that is just being written.
SPARE_POLICIES = 2


def build_learning(
    config: Config,
    ledger: Ledger,
    learner: Learner,
    sampler: Sampler,
    renderer: ChatRenderer,
    registry: CollectorRegistry,
) -> LearnLoop:
    """The learning of a server. Raises ConfigError."""
    run_dir = config.run_dir.expanduser()
    gate = Gate(read_items(config.gate), config.gate_margin, sampler, renderer) if config.gate else None
    settings = LearnSettings(
        batch_size=config.batch_size,
        max_steps=config.max_steps,
        max_staleness=config.max_staleness,
        batch_timeout=config.batch_timeout,
        save_interval=config.save_interval,
    )
    return LearnLoop(
        ledger,
        learner,
        sampler,
        Weights.of(config),
        settings,
        run_checkpoints(config),
        Policies(run_dir / "policies", config.policies_held + SPARE_POLICIES),
        Reporter(sinks(config, run_dir, registry)),
        gate,
        records.Records(run_dir / records.FILE) if config.record else None,
    )


def run_checkpoints(config: Config) -> Checkpoints:
    return Checkpoints(config.run_dir.expanduser() / "checkpoints", config.keep_checkpoints)


def sinks(config: Config, run_dir: Path, registry: CollectorRegistry) -> list[Sink]:
    found: list[Sink] = [JsonLines(run_dir / "metrics.jsonl"), Prometheus(registry)]
    if config.tensorboard:
        found.append(TensorBoard(run_dir / "tensorboard"))
    if config.wandb_project:
        settings = config.model_dump(mode="json", exclude={"api_key", "judge_api_key"})
        found.append(WeightsAndBiases(config.wandb_project, run_dir, settings))
    return found


def check_learning(config: Config) -> None:
    """What can be wrong with the owner's files and packages, said before a model is loaded. Raises ConfigError."""
    if config.gate:
        read_items(config.gate)
    if config.tensorboard:
        TensorBoard.check()
    if config.wandb_project:
        WeightsAndBiases.check()
    if config.custom_loss_function_path:
        check_plugin(config.custom_loss_function_path, LOSS_OPTION, LOSS_NAMES)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where learning begins."""

    checkpoint: Checkpoint | None
    own: bool
    """Whether it goes on with what this run's ledger tells of; if not, it begins anew, from a checkpoint or nothing."""


async def serve_learned(config: Config, sampler: Sampler) -> None:
    """With learning off, what was learned before serves all the same."""
    checkpoint = (await asyncio.to_thread(where_to_begin, config)).checkpoint
    if checkpoint is not None:
        await sampler.publish(checkpoint.version, policy_in(checkpoint.folder))


def where_to_begin(config: Config) -> Beginning:
    """What --resume-from-ckpt means. Raises ConfigError if it is a folder that cannot be used."""
    given, checkpoints = config.resume_from_ckpt, run_checkpoints(config)
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

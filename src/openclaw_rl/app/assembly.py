"""From options to running parts: engines, loops, and the owner's own code."""

import asyncio
import contextlib
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry

from openclaw_rl.app.background import Loops
from openclaw_rl.app.config import Config
from openclaw_rl.app.rollouts import Rollout
from openclaw_rl.engines import custom
from openclaw_rl.engines.base import Learner, Sampler
from openclaw_rl.engines.custom import CustomSampler
from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.learner_messages import LearnerOptions
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.sampler_messages import WorkerOptions
from openclaw_rl.engines.tinker.build import build_learner, build_sampler, connect
from openclaw_rl.engines.tinker.sampler import TinkerSampler
from openclaw_rl.judge.build import JudgingModel, build_loop, check_teacher, needs_other_model
from openclaw_rl.judge.dispatch import Signals
from openclaw_rl.learn.build import build_learning, serve_learned, where_to_begin
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.models import EMBEDDED, fetch_model, fetch_tokenizer
from openclaw_rl.plugins import load_plugin
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.tokenizer import ChatTokenizer


class Backend(Protocol):
    """Where models run. Its `sampler` is the policy's, and has been started before the others are asked for."""

    @property
    def sampler(self) -> Sampler: ...
    def learner(self) -> Learner:
        """The policy's learner."""

    def another(self, folder: Path, name: str) -> Sampler:
        """A sampler of another model."""

    def describe(self) -> str:
        """Where and how, in words."""


class LocalBackend:
    """PyTorch on this machine."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.sampler = LocalSampler(worker_options(config, folder), config.max_queue)

    def learner(self) -> Learner:
        return LocalLearner(learner_options(self.config, self.folder), self.sampler.shared_weights)

    def another(self, folder: Path, name: str) -> Sampler:
        return LocalSampler(worker_options(self.config, folder), self.config.max_queue)

    def describe(self) -> str:
        ready = self.sampler.ready
        assert ready is not None
        gib = ready.weight_bytes / (1 << 30)
        return f"local on {ready.device}, {ready.dtype}, {gib:.2g} GiB of weights, context {ready.max_context} tokens"


class TinkerBackend:
    """Tinker's service, or a server that speaks like it."""

    def __init__(self, stack: contextlib.AsyncExitStack, config: Config, folder: Path) -> None:
        self.config, self.connection = config, connect(config)
        stack.push_async_callback(self.connection.close)
        self.sampler: TinkerSampler = build_sampler(config, self.connection, folder, config.policy_name)

    def learner(self) -> Learner:
        return build_learner(self.config, self.connection, self.sampler)

    def another(self, folder: Path, name: str) -> Sampler:
        return build_sampler(self.config, self.connection, folder, name)

    def describe(self) -> str:
        where = self.config.tinker_base_url or "in the cloud"
        limit = self.sampler.limits.max_context_tokens
        return f"{self.connection.traits.name} at {where}, context {limit} tokens"


def open_backend(stack: contextlib.AsyncExitStack, config: Config, folder: Path) -> Backend:
    """The backend of the options; what it holds open is closed when the stack ends."""
    return LocalBackend(config, folder) if config.engine == "local" else TinkerBackend(stack, config, folder)


def fetch(config: Config, name: str | None) -> Path:
    """The folder with what this machine needs of a model. Raises ModelNotFound."""
    cache = config.cache_dir.expanduser()
    return fetch_model(name, cache) if config.engine == "local" else fetch_tokenizer(name or config.policy_name, cache)


async def start_model(stack: contextlib.AsyncExitStack, sampler: Sampler, folder: Path) -> JudgingModel:
    """An engine that serves and the renderer of its model; both are there until the stack ends."""
    stack.push_async_callback(sampler.close)
    starting = asyncio.create_task(sampler.start())
    await asyncio.sleep(0)
    renderer = await asyncio.to_thread(ChatRenderer, folder)
    await starting
    return JudgingModel(sampler, renderer)


async def other_model(
    stack: contextlib.AsyncExitStack, config: Config, backend: Backend, policy: JudgingModel
) -> JudgingModel | None:
    """The model of --teacher-model-name, if it is another one and has something to do."""
    name = config.teacher_model_name
    if name is None or not needs_other_model(config):
        return None
    folder = fetch(config, name)
    if Signals.of(config).opd:
        check_teacher(policy.renderer.tokenizer, ChatTokenizer(folder))
    return await start_model(stack, backend.another(folder, name), folder)


def answering_sampler(config: Config, sampler: Sampler) -> Sampler:
    """Who answers requests: the engine, or the owner's own code with it."""
    path = config.custom_generate_function_path
    return CustomSampler(sampler, path) if path else sampler


def check_own_code(config: Config) -> None:
    """The owner's ways to answer and to ask are imported before a model is loaded. Raises ConfigError."""
    if config.custom_generate_function_path:
        load_plugin(config.custom_generate_function_path, custom.OPTION, custom.NAMES)
    build_rollout(config)


def build_rollout(config: Config) -> Rollout | None:
    path = config.rollout_function_path
    return Rollout(path, config.model_dump(exclude={"api_key", "judge_api_key"})) if path else None


async def build_loops(
    stack: contextlib.AsyncExitStack,
    config: Config,
    ledger: Ledger | None,
    backend: Backend,
    policy: JudgingModel,
    other: JudgingModel | None,
    registry: CollectorRegistry,
) -> Loops:
    """What goes on beside serving; the policy that was learned last serves from the start."""
    if ledger is None or not config.learns:
        await serve_learned(config, policy.sampler)
        judging = build_loop(config, ledger, policy, other, registry) if ledger else None
        return Loops(judging, None, config.shutdown_seconds)
    judging = build_loop(config, ledger, policy, other, registry)
    learner = backend.learner()
    stack.push_async_callback(learner.close)
    learning = build_learning(config, ledger, learner, policy.sampler, policy.renderer, registry)
    beginning = await asyncio.to_thread(where_to_begin, config)
    await learning.begin(beginning.checkpoint, own=beginning.own)
    return Loops(judging, learning, config.shutdown_seconds)


def worker_options(config: Config, folder: Path) -> WorkerOptions:
    return WorkerOptions(
        model=folder,
        device=config.device,
        dtype=config.dtype,
        max_sequences=config.max_sequences,
        max_context=config.max_context_tokens,
        cache_gib=config.kv_cache_gib,
        policy_slots=config.policies_held,
        lora_rank=config.lora_rank,
    )


def learner_options(config: Config, folder: Path) -> LearnerOptions:
    return LearnerOptions(
        model=folder,
        device=config.device,
        dtype=config.dtype,
        rank=config.lora_rank,
        alpha=config.lora_alpha or 2.0 * config.lora_rank,
        dropout=config.lora_dropout,
        modules=config.adapted_modules,
        training=config.training,
        micro_batch_tokens=config.micro_batch_tokens,
        checkpointing=config.gradient_checkpointing,
        offload=config.offload_optimizer_state,
        base_model=config.model_name or EMBEDDED,
        custom_loss=config.custom_loss_function_path,
    )

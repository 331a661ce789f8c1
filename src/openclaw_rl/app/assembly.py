"""Builds the parts of a server from the options: engines, judging, learning and the user's own code."""

import asyncio
import contextlib
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry

from openclaw_rl.app.background import BackgroundLoops, Rollout
from openclaw_rl.app.config import Config
from openclaw_rl.engines import custom_sampler
from openclaw_rl.engines.base import Learner, Sampler, TextSampler
from openclaw_rl.engines.custom_sampler import CustomSampler
from openclaw_rl.engines.factory import ModelFiles, Resources, fetch
from openclaw_rl.engines.lines import LearnerOfLines, SamplerOfLines
from openclaw_rl.engines.outside.options import OutsideOptions
from openclaw_rl.engines.remote.outside_weights import OutsideWeightsSampler
from openclaw_rl.judge.build import JudgeSetup, JudgingModel, build_loop, check_teacher
from openclaw_rl.judge.rules.kept import keeps
from openclaw_rl.learn.build import (
    LearnSetup,
    ServedLines,
    build_learning,
    build_lines,
    build_practice,
    serve_learned,
    where_to_begin,
)
from openclaw_rl.learn.outside import OutsideSettings, OutsideTraining
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import add_weights, latest_version
from openclaw_rl.plugins import load_plugin
from openclaw_rl.rendering.chat import ChatRenderer, MessageRenderer
from openclaw_rl.rendering.tokenizer import ChatTokenizer
from openclaw_rl.types import BASE_VERSION


class Engines:
    """The engines of a server. The stack closes them."""

    def __init__(self, stack: contextlib.AsyncExitStack, config: Config, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.settings = config.engine_settings
        self.resources = Resources(stack)
        self.sampler = self.open_sampler(folder, config.policy_name)
        """The policy's sampler. It must be started before a learner is opened."""

    def open_sampler(self, folder: Path, name: str, *, teacher: bool = False) -> Sampler:
        settings = self.settings.for_teacher() if teacher else self.settings
        return self.config.sampler.open(settings, self.resources, folder, name)

    def open_learner(self) -> Learner:
        """The policy's learner. Raises EngineUnavailable."""
        return self.config.learner.open(self.settings, self.resources, self.folder, self.sampler)


def fetch_files(config: Config, name: str | None = None) -> Path:
    """The folder with the files of a model that this machine needs; by default of the policy. Raises ModelNotFound."""
    needed = {config.sampler.model_files, *([config.learner.model_files] if config.learns else [])}
    files = ModelFiles.WEIGHTS if ModelFiles.WEIGHTS in needed else config.sampler.model_files
    return fetch(files, name or config.policy_name, config.run.cache)


async def start_model(stack: contextlib.AsyncExitStack, sampler: Sampler, folder: Path) -> JudgingModel:
    """Start a sampler and load its model's renderer. The stack closes the sampler."""
    stack.push_async_callback(sampler.close)
    starting = asyncio.create_task(sampler.start())
    await asyncio.sleep(0)
    is_text = isinstance(sampler, TextSampler)
    renderer = MessageRenderer() if is_text else await asyncio.to_thread(ChatRenderer, folder)
    await starting
    return JudgingModel(sampler, renderer)


async def start_other_model(
    stack: contextlib.AsyncExitStack, engines: Engines, policy: JudgingModel
) -> JudgingModel | None:
    """Start the model that judges and teaches, if one does and it is not the policy's own sampler."""
    config = engines.config
    if not config.has_other_model or not judge_setup(config).uses_model:
        return None
    name = config.model.teacher_model_name or config.policy_name
    folder = fetch_files(config, name)
    if config.learning_method.teacher_request is not None:
        check_teacher(policy.chat_renderer.tokenizer, ChatTokenizer(folder))
    return await start_model(stack, engines.open_sampler(folder, name, teacher=True), folder)


def answering_sampler(config: Config, sampler: Sampler) -> Sampler:
    """The sampler that answers requests: the engine's, or the user's own code on top of it."""
    path = config.engine.custom_generate_function_path
    return CustomSampler(sampler, path) if path else sampler


def check_user_code(config: Config) -> None:
    """Import the user's functions for answers and rollouts before a model is loaded. Raises ConfigError."""
    path = config.engine.custom_generate_function_path
    if path:
        load_plugin(path, custom_sampler.OPTION, custom_sampler.NAMES)
    build_rollout(config)


def build_rollout(config: Config) -> Rollout | None:
    path = config.rollout.rollout_function_path
    return Rollout(path, config.values()) if path else None


def judge_setup(config: Config) -> JudgeSetup:
    return JudgeSetup(
        config.judge,
        config.learning_method,
        config.asks_llm,
        config.has_capable_llm,
        config.run.seed,
        config.values(),
        config.notes_to_teach,
        several_users=len(config.server.user_keys) > 1,
    )


def learn_setup(config: Config) -> LearnSetup:
    held = config.engine_settings.policies_held
    return LearnSetup(
        config.training,
        config.run.folder,
        config.learning_method,
        held,
        config.values(),
        config.run.seed,
        several_users=len(config.server.user_keys) > 1,
        personal=config.notes_to_teach.distil_personal,
    )


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

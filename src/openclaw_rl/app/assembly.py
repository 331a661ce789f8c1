"""Builds the parts of a server from the options: engines, judging, learning and the user's own code."""

import asyncio
import contextlib
from pathlib import Path

from openclaw_rl.app.config import Config
from openclaw_rl.app.rollout_function import build_rollout
from openclaw_rl.engines import custom_sampler
from openclaw_rl.engines.base import Learner, Sampler, TextSampler
from openclaw_rl.engines.factory import ModelFiles, Resources, fetch
from openclaw_rl.judge.build import JudgeSetup, JudgingModel, check_teacher
from openclaw_rl.learn.build import LearnSetup
from openclaw_rl.plugins import load_plugin
from openclaw_rl.rendering.chat import ChatRenderer, MessageRenderer
from openclaw_rl.rendering.tokenizer import ChatTokenizer


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


def check_user_code(config: Config) -> None:
    """Import the user's functions for answers and rollouts before a model is loaded. Raises ConfigError."""
    path = config.engine.custom_generate_function_path
    if path:
        load_plugin(path, custom_sampler.OPTION, custom_sampler.NAMES)
    build_rollout(config)


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

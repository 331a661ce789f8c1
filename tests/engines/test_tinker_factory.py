"""What the tinker backend cannot do is said in a sentence before anything starts, and it loads nothing heavy."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.app.config import Config, load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineAway, EngineUnavailable
from openclaw_rl.engines.factory import Resources
from openclaw_rl.engines.tinker import factory, sdk
from openclaw_rl.engines.tinker.sdk import Kind, LastWarning, read_error
from openclaw_rl.engines.tinker.traits import Traits, look_at
from openclaw_rl.errors import UserError

URL = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setattr(sdk, "installed", lambda: True)


def configured(**given: Any) -> Config:
    return load({"backend": "tinker", **given}, {}).config


def check_tinker(config: Config) -> None:
    settings = config.engine_settings
    config.sampler.check(settings)
    if config.learns:
        config.learner.check(settings)


@contextlib.asynccontextmanager
async def learner_of(config: Config, folder: Path, traits: Traits | None = None) -> AsyncIterator[Any]:
    settings = config.engine_settings
    async with contextlib.AsyncExitStack() as stack:
        resources = Resources(stack)
        sampler: Any = config.sampler.open(settings, resources, folder, config.policy_name)
        sampler.connection.traits = traits or Traits()
        yield config.learner.open(settings, resources, folder, sampler)


@pytest.mark.parametrize(
    "given",
    [
        {"lora_rank": 0},
        {"kl_loss_coef": 0.1},
        {"custom_loss_function_path": "loss.py"},
        {"lora_dropout": 0.1},
        {"learner_ranks": "2"},
        {"lora_alpha": 8.0},
        {"lora_experts": True},
        {"lora_target_modules": "q_proj,v_proj"},
    ],
)
def test_what_cannot_be_had_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(given)).replace("_", "-")) as refusal:
        check_tinker(configured(**given))
    assert "--backend local" in str(refusal.value)
    check_tinker(configured(**given, max_steps=0))


@pytest.mark.parametrize(
    ("modules", "trained"),
    [
        ("all-linear", (True, True)),
        ("q_proj,k_proj,v_proj,o_proj", (True, False)),
        ("gate_proj,up_proj,down_proj", (False, True)),
    ],
)
async def test_the_halves_of_a_layer_can_be_chosen(modules: str, trained: tuple[bool, bool], tmp_path: Path) -> None:
    config = configured(lora_target_modules=modules)
    check_tinker(config)
    async with learner_of(config, tmp_path) as learner:
        assert (learner.primitives.options.train_attn, learner.primitives.options.train_mlp) == trained
        assert learner.primitives.sampler.options.model == "Qwen/Qwen3-4B-Instruct-2507"


async def test_a_loss_that_the_server_does_not_know_is_said_at_the_start(tmp_path: Path) -> None:
    traits = Traits("SkyRL tx", frozenset({"cross_entropy", "ppo"}))
    with pytest.raises(EngineUnavailable, match=r"does not know --loss-fn cispo; it knows ppo\."):
        async with learner_of(configured(loss_fn="cispo"), tmp_path, traits):
            raise AssertionError("it was made")


async def test_a_loss_that_is_not_computed_for_tinker_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "LOSSES", {"ppo"})
    with pytest.raises(EngineUnavailable, match=r"does not know --loss-fn cispo; it knows ppo\."):
        async with learner_of(configured(loss_fn="cispo"), tmp_path):
            raise AssertionError("it was made")


def test_without_the_sdk_or_a_key_a_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match="TINKER_API_KEY"):
        check_tinker(configured())
    check_tinker(configured(tinker_base_url=URL))
    monkeypatch.setattr(sdk, "installed", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'openclaw-rl\[tinker\]'"):
        check_tinker(configured())


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineAway, match=rf"{URL} \(--tinker-base-url\)"):
        await look_at(URL)
    assert await look_at(None) == Traits()


def test_a_server_process_loads_neither_the_sdk_nor_pytorch_until_it_is_used() -> None:
    program = """
import importlib.util, sys
import openclaw_rl.app.server
from openclaw_rl.engines.factory import Resources
from openclaw_rl.engines.tinker import sdk
assert not {"torch", "tinker"} & set(sys.modules)
if importlib.util.find_spec("tinker"):
    sdk.load()
    assert "tinker" in sys.modules and "torch" not in sys.modules and importlib.util.find_spec("torch")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_error_inside_another_is_read() -> None:
    outer = ValueError("Error retrieving result")
    outer.__cause__ = ConnectionResetError("reset by peer")
    assert read_error(outer).kind is Kind.AWAY
    assert "reset by peer" in read_error(outer).words
    assert read_error(ValueError("nobody knows")).words == "nobody knows"


def test_the_last_warning_of_the_sdk_is_kept() -> None:
    words = LastWarning()
    words.handle(logging.makeLogRecord({"msg": "The job is paused\ndue to billing.", "levelno": logging.WARNING}))
    assert words.text == "The job is paused due to billing"

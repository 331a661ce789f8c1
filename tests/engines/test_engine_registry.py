"""Which engines there are, and which of them work together."""

import re
from typing import Any

import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import Config, load
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import SamplerCapabilities, WeightForm
from openclaw_rl.engines.factory import check_pair, learner_factory, sampler_factory, sampler_that_loads
from openclaw_rl.engines.registry import SAMPLERS, backends, engine_sections
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.errors import UserError
from support.methods import a_method


def configured(**given: Any) -> Config:
    return load(given, {}).config


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_says_what_it_needs_and_loads(name: str) -> None:
    factory = sampler_factory(name)
    assert factory.name == name
    can = factory.capabilities(configured(sampler=name).engine_settings)
    has_weights = not SAMPLERS[name].takes_text
    assert (bool(factory.default_model), bool(can.loads), can.tokens) == (has_weights,) * 3


@pytest.mark.parametrize("name", backends())
def test_what_a_learner_writes_its_own_engines_sampler_loads(name: str) -> None:
    for rank in (0, 8):
        settings = configured(backend=name, lora_rank=rank).engine_settings
        check_pair(sampler_factory(name), learner_factory(name), settings)


@pytest.mark.parametrize(("sampler", "learner"), [("local", "tinker"), ("tinker", "local")])
def test_a_sampler_that_cannot_load_what_the_learner_writes_is_refused_at_the_start(
    sampler: str, learner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    monkeypatch.setattr(sdk, "installed", lambda: True)
    with pytest.raises(ConfigError, match=f"--sampler {sampler} does not work with --learner {learner}: the learner"):
        check(configured(sampler=sampler, learner=learner))


def test_backend_chooses_both_unless_one_is_named() -> None:
    config = configured(backend="tinker")
    assert (config.sampler.name, config.learner.name) == ("tinker", "tinker")
    config = configured(backend="tinker", sampler="local")
    assert (config.sampler.name, config.learner.name) == ("local", "tinker")


def test_all_weights_travel_as_a_model_folder_and_an_adapter_as_a_peft_folder() -> None:
    local = learner_factory("local")
    assert local.capabilities(configured(lora_rank=0).engine_settings).writes == {WeightForm.MODEL}
    assert local.capabilities(configured(lora_rank=8).engine_settings).writes == {WeightForm.PEFT}


def test_an_engine_that_is_not_there_is_refused_with_those_there_are() -> None:
    expected = "--sampler 'warp' (from flag) is not valid: use one of auto, local, tinker, vllm, sglang, upstream."
    with pytest.raises(ConfigError, match=re.escape(expected)):
        configured(sampler="warp")


def test_a_method_that_needs_more_than_the_sampler_gives_is_refused() -> None:
    plain = SamplerCapabilities(loads=frozenset(WeightForm))
    poor = SamplerCapabilities(frozenset(WeightForm), max_top_logprobs=2, scores_targets=False, advice="update it")
    with pytest.raises(UserError, match=r"needs the 4 likeliest tokens .* at most 2: .* Update it\."):
        a_method("topk-select").check_sampler(poor)
    with pytest.raises(UserError, match="--topk-subset-mode teacher needs log-probs of chosen tokens"):
        a_method("topk-select", topk_k=2, topk_subset_mode="teacher").check_sampler(poor)
    for name in ("rl", "opd", "combine"):
        a_method(name).check_sampler(poor)
    a_method("topk-select", topk_subset_mode="teacher").check_sampler(plain)


def test_a_policy_finds_the_engine_that_loads_it_whatever_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    settings = configured().engine_settings
    assert configured().sampler.name == "tinker"
    assert sampler_that_loads(WeightForm.PEFT, settings).name == "local"
    assert sampler_that_loads(WeightForm.REMOTE, settings).name == "tinker"


def test_engines_are_given_no_options_of_other_parts() -> None:
    config = configured(api_key="S3CRET")
    assert set(config.engine_settings.sections) == set(engine_sections())
    assert "S3CRET" not in repr(config.engine_settings)

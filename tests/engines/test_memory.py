"""Memory of models, from the numbers in their config.json."""

import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from openclaw_rl.engines.local.family_size import adaptable_names, size_of_model
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.model.transformers_decoder import load_language_model
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE
from openclaw_rl.engines.local.sampling.runner import bytes_per_page
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.memory import (
    BITS,
    FLOAT,
    ModelSize,
    Trained,
    known_models,
    learner_memory,
    read_size,
    sampler_memory,
)
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.models import read_json_object
from support.decoders import STATE_FAMILIES, TRANSFORMERS_FAMILIES, core_and_more, save_random
from support.tiny_models import save_tiny_model

GIB = 1 << 30
QWEN3_4B = known_models()["Qwen/Qwen3-4B"]


def qwen() -> ModelSize:
    size = read_size(QWEN3_4B)
    assert size is not None
    return size


@pytest.mark.parametrize("name", known_models())
def test_known_models_have_as_many_parameters_as_their_names_say(name: str) -> None:
    size = read_size(known_models()[name])
    assert size is not None
    (number, unit) = re.findall(r"-([\d.]+)([MB])", name)[0]
    assert size.parameters == pytest.approx(float(number) * {"M": 1e6, "B": 1e9}[unit], rel=0.06)


@pytest.mark.parametrize("tied", [True, False])
def test_the_parameters_are_those_of_the_model(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path, tied=tied)
    size = read_size(read_json_object(folder / "config.json"))
    assert size is not None
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert size.parameters == sum(weight.numel() for weight in model.parameters())
    import torch

    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    adapter = LoraWeights.create(decoder.shape, 4, 8.0)
    expected = sum(weight.numel() for weight in adapter.parameters())
    assert size.adapter_parameters(4, LINEAR_MODULES) == expected


EVERY_FAMILY = {**TRANSFORMERS_FAMILIES, **STATE_FAMILIES}


@pytest.mark.parametrize("family", core_and_more(["tiny", *EVERY_FAMILY], ("tiny", "gpt-oss")))
def test_the_memory_of_every_family_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    import torch

    known = family != "tiny"
    folder = save_random(EVERY_FAMILY[family], tmp_path) if known else save_tiny_model(tmp_path)
    size = size_of_model(read_json_object(folder / "config.json"))
    assert size is not None
    for quantize, bits in BITS.items():
        model = load_language_model(folder, torch.float32, torch.device("cpu"), quantize=quantize)
        assert size.weight_bytes(FLOAT, bits) == pytest.approx(model.weight_bytes, rel=0.005)
    adapter = LoraWeights.create(model.shape, 4, 8.0)
    assert size.adapter_parameters(4, LINEAR_MODULES) == sum(weight.numel() for weight in adapter.parameters())
    if has_experts := any(module.experts for module in model.shape.adaptable):
        adapter = LoraWeights.create(model.shape, 4, 8.0, experts=True)
        everything = sum(weight.numel() for weight in adapter.parameters())
        assert size.adapter_parameters(4, LINEAR_MODULES, experts=True) == everything
    assert bool(size.experts) == has_experts
    targets = list(dict.fromkeys(module.target for module in model.shape.adaptable if not module.experts))
    assert sorted(adaptable_names(folder)) == sorted(targets)
    if (state := getattr(model.shape, "state", None)) is not None:
        assert size.cache_bytes(1, FLOAT) == state.per_token
    elif family != "gpt-neox":  # where the number of heads for keys in the test's configuration means nothing
        assert size.cache_bytes(PAGE_SIZE, FLOAT) == bytes_per_page(model.shape, torch.float32)


def test_weights_of_4_bits_take_the_memory_of_codes_and_scales() -> None:
    width_of_code = 0.5 + 4 / 64
    inside = qwen().parameters - qwen().others
    assert qwen().weight_bytes(2, BITS["4bit"]) == inside * width_of_code + 2 * qwen().others
    stored = size_of_model(
        {
            **QWEN3_4B,
            "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        }
    )
    assert stored is not None
    assert stored.weight_bytes(2) == qwen().weight_bytes(2, BITS["4bit"])
    lora = Trained(rank=32, modules=LINEAR_MODULES, width=2, policies=4, bits=BITS["4bit"])
    assert sampler_memory(qwen(), lora, gpus=1, context=0).weights / GIB == pytest.approx(2.63, abs=0.01)


def test_qwen3_4b_is_as_large_as_published() -> None:
    assert qwen().parameters == pytest.approx(4.02e9, rel=0.002)
    # 36 layers of 8 heads of 128 numbers of two bytes, keys and values.
    assert qwen().cache_bytes(1, width=2) == 147456


def test_an_adapter_is_trained_beside_weights_that_may_be_shared_or_sharded() -> None:
    lora = Trained(rank=32, modules=LINEAR_MODULES, width=2, policies=4)
    alone = learner_memory(qwen(), lora, ranks=1, sharded=False, has_weights=True)
    shared = learner_memory(qwen(), lora, ranks=1, sharded=False, has_weights=False)
    sharded = learner_memory(qwen(), lora, ranks=4, sharded=True, has_weights=True)
    assert alone.weights / GIB == pytest.approx(7.49, abs=0.01)
    assert (shared.weights, sharded.weights) == (0, alone.weights / 4)
    adapter = qwen().adapter_parameters(32, LINEAR_MODULES)
    assert (alone.gradients, alone.optimiser) == (4 * adapter, 16 * adapter)
    assert sharded.gradients == alone.gradients
    assert alone.total == sum(alone.parts.values())


def test_a_line_that_waits_takes_its_adapter_and_its_moments() -> None:
    one, four = (Trained(rank=16, modules=LINEAR_MODULES, width=2, policies=4, lines=lines) for lines in (1, 4))
    alone, lines = (learner_memory(qwen(), each, ranks=1, sharded=False, has_weights=True) for each in (one, four))
    adapter = qwen().adapter_parameters(16, LINEAR_MODULES)
    assert lines.total - alone.total == 3 * adapter * 3 * 4


def test_all_weights_take_masters_gradients_and_moments_in_float32() -> None:
    full = Trained(rank=0, modules=(), width=2, policies=2)
    whole = learner_memory(qwen(), full, ranks=1, sharded=False, has_weights=True)
    quarter = learner_memory(qwen(), full, ranks=4, sharded=True, has_weights=True)
    count = qwen().parameters
    assert (whole.weights, whole.gradients, whole.optimiser) == (8 * count, 4 * count, 8 * count)
    assert quarter.total == whole.total / 4
    # The sampler holds the base model and two policies.
    assert sampler_memory(qwen(), full, gpus=1, context=0).weights == 3 * 2 * count


def test_a_sampler_divides_everything_over_its_gpus() -> None:
    lora = Trained(rank=32, modules=LINEAR_MODULES, width=2, policies=4)
    one = sampler_memory(qwen(), lora, gpus=1, context=32768)
    two = sampler_memory(qwen(), lora, gpus=2, context=32768)
    assert one.kv_cache / GIB == 4.5
    assert two.total == one.total / 2


@pytest.mark.parametrize("change", [{"num_experts": 128}, {"hidden_size": None}, {"num_attention_heads": "many"}])
def test_what_cannot_be_computed_is_unknown(change: dict[str, object]) -> None:
    assert read_size({**QWEN3_4B, **change}) is None

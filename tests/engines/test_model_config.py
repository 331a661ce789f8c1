"""The sizes of a model are those that Transformers reads from its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from openclaw_rl.engines.local.model.decoder import Shape
from openclaw_rl.engines.local.model.model_config import UnsupportedModel, read_model_config
from support.decoders import FAMILIES, LLAMA3_ROPE, SIZE

CPU = torch.device("cpu")
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
#: Ids within the vocabulary, which Transformers checks.
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR, YARN = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 4.0}
#: What a file may say or leave out beside the sizes.
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": None},
    {"head_dim": 32},
    {"head_dim": 0},
    {"rms_norm_eps": 1e-5},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"sliding_window": 128},
    {"sliding_window": 128, "use_sliding_window": True},
    {"use_sliding_window": True},
    {"sliding_window": None},
    {"sliding_window": 0, "use_sliding_window": True},
    {"no_rope_layers": [1, 0, 1]},
    {"no_rope_layer_interval": 2},
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    {"rope_parameters": {"rope_theta": 700.0}, "rope_theta": 500.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "notes": {"by": "someone"}}},
    {"rope_parameters": LINEAR},
    {"rope_parameters": YARN},
    {"rope_scaling": {key: LLAMA3_ROPE[key] for key in LLAMA3_ROPE if key != "rope_theta"}},
    {"torch_dtype": "bfloat16"},
)


def write(folder: Path, model_type: str, **settings: Any) -> Path:
    """A config.json with the sizes and these settings; a value of `...` leaves a field out."""
    content = {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type, **IDS, **SIZE, **settings}
    kept = {key: value for key, value in content.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def shape_of_transformers(config: Any) -> Shape:
    max_context = config.max_position_embeddings
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        max_context = min(max_context, config.sliding_window)
    return Shape(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        max_context=max_context,
        rotary_layers=tuple(map(bool, getattr(config, "no_rope_layers", None) or [True] * config.num_hidden_layers)),
        head_norm=config.model_type == "qwen3",
    )


def assert_same(folder: Path) -> None:
    theirs, ours = AutoConfig.from_pretrained(folder), read_model_config(folder)
    assert Shape.from_config(ours) == shape_of_transformers(theirs)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    rope, frequencies = theirs.rope_parameters, ours.rotary_frequencies(folder, CPU)
    if rope["rope_type"] == "default":
        dim = Shape.from_config(ours).head_dim
        inverse, scale = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim), 1.0
    else:
        inverse, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, CPU)
    torch.testing.assert_close(frequencies.inverse, inverse)
    assert frequencies.scale == scale


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        (model_type, settings)
        for model_type in ARCHITECTURES
        for settings in SETTINGS
        # Transformers refuses null here.
        if (model_type, settings) != ("mistral", {"num_key_value_heads": None})
    ],
    ids=str,
)
def test_a_file_is_read_as_transformers_reads_it(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    assert_same(write(tmp_path, model_type, **settings))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_field_that_is_left_out_has_the_default_of_its_family(model_type: str, tmp_path: Path) -> None:
    assert_same(write(tmp_path, model_type, num_key_value_heads=..., num_attention_heads=64, hidden_size=1024))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_that_transformers_wrote_is_read(family: str, tmp_path: Path) -> None:
    config = FAMILIES[family]
    config.architectures = [ARCHITECTURES[config.model_type]]
    config.save_pretrained(tmp_path)
    assert_same(tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not a model family"),
        ({"architectures": []}, "unknown is not a model family"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "model_type is llama, but Qwen2ForCausalLM is qwen2"),
        *[({name: ...}, f"{name}: Field required") for name in SIZE if name != "num_key_value_heads"],
        ({"hidden_size": 65}, "not a multiple"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"head_dim": 33}, "odd size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"dtype": "x"}, "dtype"),
        ({"no_rope_layers": [1]}, "no_rope_layers"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dynamic"),
        ({"rope_parameters": {"rope_type": "unheard"}}, "cannot be used"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}}, "different ways"),
    ],
    ids=str,
)
def test_what_the_decoder_would_compute_wrongly_is_refused(
    settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, "llama", **settings)
    with pytest.raises(UnsupportedModel, match=reason):
        read_model_config(folder).rotary_frequencies(folder, CPU)


def test_layers_without_rotation_may_be_booleans(tmp_path: Path) -> None:
    layers = read_model_config(write(tmp_path, "smollm3", no_rope_layers=[True, False, True])).rotary_layers
    assert layers == (True, False, True)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, "mistral", sliding_window=128)).max_context == 128

"""The sizes of a model of any family that Transformers computes, from its config.json alone."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from openclaw_rl.engines.local.families import ATTENDING, has_own_decoder, is_adapted, stored_bits
from openclaw_rl.engines.memory import ModelSize, read_size
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.models import read_json_object

log = logging.getLogger(__name__)


def size_of_model(config: Mapping[str, Any]) -> ModelSize | None:
    """The sizes of the model of a config.json; None if nothing here knows its family."""
    if not config.get("architectures") or has_own_decoder(config):
        size = read_size(config)
        return size and replace(size, bits=stored_bits(config))
    import torch
    import transformers

    settings = {name: with_floats(value) for name, value in config.items() if name != "quantization_config"}
    try:
        with torch.device("meta"):
            make: Any = transformers.AutoModelForCausalLM.from_config
            model = make(transformers.AutoConfig.for_model(**settings), trust_remote_code=False)
        return size_of_modules(model, stored_bits(config))
    except Exception as error:  # noqa: BLE001 - Transformers raises errors of many types for what it does not know
        log.debug("the sizes cannot be computed: %s", error)
        return None


def with_floats(value: Any) -> Any:
    """A value of a config.json as Transformers reads it: numbers that JSON does not have are objects there."""
    if isinstance(value, list):
        return [with_floats(one) for one in value]
    return float(value["__float__"]) if isinstance(value, dict) and list(value) == ["__float__"] else value


def adaptable_names(folder: Path) -> tuple[str, ...]:
    """The modules that the local learner's adapters may change, by the names of the model's family.

    For a folder that is not on this machine yet, those of the Llama family.
    """
    if not (folder / "config.json").is_file():
        return LINEAR_MODULES
    size = size_of_model(read_json_object(folder / "config.json"))
    return tuple(size.adaptable) if size else LINEAR_MODULES


def size_of_modules(model: Any, bits: int) -> ModelSize:
    from openclaw_rl.engines.local.model.quantised_modules import layer_weights
    from openclaw_rl.engines.local.model.transformers_sizes import adaptable_experts

    weights = layer_weights(model)
    has_experts = any("experts" in path.split(".") for path, _ in model.named_modules())
    adaptable: Counter[str] = Counter()
    for path, weight in weights.items():
        module = path.removesuffix(".weight")
        if module != path and "vision" not in path and is_adapted(model, module, has_experts=has_experts):
            adaptable[module.rpartition(".")[2]] += sum(weight.shape)
    everything = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    config = model.config.get_text_config().to_dict()
    return ModelSize(
        matrices=Counter(tuple(weight.shape) for weight in weights.values()),
        others=everything - sum(weight.numel() for weight in weights.values()),
        adaptable=adaptable,
        cached=2 * attending_layers(model.config.get_text_config()) * keys_in_layer(config),
        max_context=config["max_position_embeddings"],
        bits=bits,
        experts=sum(len(one.paths) * one.experts * (one.inputs + one.outputs) for one in adaptable_experts(model)),
    )


def attending_layers(config: Any) -> int:
    """How many layers have keys and values; those called hybrid have another state beside them."""
    kinds = getattr(config, "layer_types", None) or ["hybrid"] * config.num_hidden_layers
    return sum(kind in ATTENDING or kind.startswith("hybrid") for kind in kinds)


def keys_in_layer(config: Mapping[str, Any]) -> int:
    """Numbers of a token's keys in a layer; the widest layer decides for all."""
    special = config.get("per_layer_config") or {}
    return max(keys_of({**config, **layer}) for layer in ({}, *special.values()))


def keys_of(config: Mapping[str, Any]) -> int:
    heads: int = config["num_attention_heads"]
    if latent := config.get("qk_nope_head_dim"):
        # Keys and values of latent attention are cached as all heads see them.
        return heads * int(max(latent + config["qk_rope_head_dim"], config["v_head_dim"]))
    head_size: int = config.get("head_dim") or config["hidden_size"] // heads
    return head_size * int(config.get("num_key_value_heads") or heads)

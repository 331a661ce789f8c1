"""The sizes of a model that Transformers computes, from its configuration and from one forward pass."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from openclaw_rl.engines.local.families import is_adapted
from openclaw_rl.engines.local.model.experts import DOWN, GATE_UP, has_experts, inputs_first
from openclaw_rl.engines.local.model.language_model import Adaptable, Sizes
from openclaw_rl.engines.local.model.model_config import UnsupportedModel

_IN_A_LAYER = re.compile(r"(?:.*?\.)?(?P<layer>\d+)\.(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class TransformersSizes(Sizes):
    """What the configuration says and one forward pass shows."""

    adaptable: tuple[Adaptable, ...] = ()
    state: "StateSize | None" = None
    """Set if Transformers keeps a state for each sequence."""


class StateSize(NamedTuple):
    """Bytes of what Transformers keeps for a sequence."""

    fixed: int
    per_token: int


class AttentionProbe(NamedTuple):
    """How a layer attends, as the first pass shows it."""

    path: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None


def sizes_of(model: Any, calls: Mapping[int, list[AttentionProbe]], products: list[str]) -> TransformersSizes:
    """Of a model that uses our attention, which was called so."""
    config = model.config.get_text_config()
    layers = int(config.num_hidden_layers)
    if sorted(calls) != list(range(layers)) or any(len(of_layer) > 1 for of_layer in calls.values()):
        raise UnsupportedModel("its layers do not attend once each, as Transformers says of this family")
    by_layer = [calls[layer][0] for layer in range(layers)]
    return TransformersSizes(
        vocab=model.get_output_embeddings().weight.shape[0],
        hidden=model.get_input_embeddings().weight.shape[1],
        intermediate=intermediate_of(config),
        layers=layers,
        heads=max(call.heads for call in by_layer),
        kv_heads=max(call.kv_heads for call in by_layer),
        head_dim=max(call.dim for call in by_layer),
        max_context=max_context(config, by_layer),
        adaptable=adaptable_modules(model, products),
    )


def sizes_with_state(model: Any, state: StateSize, products: list[str]) -> TransformersSizes:
    """Of a model whose sequences have a state each, as its configuration says."""
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    hidden = int(model.get_input_embeddings().weight.shape[1])
    return TransformersSizes(
        vocab=model.get_output_embeddings().weight.shape[0],
        hidden=hidden,
        intermediate=intermediate_of(config),
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        max_context=max_context(config, []),
        adaptable=adaptable_modules(model, products),
        state=state,
    )


def intermediate_of(config: Any) -> int:
    """The width of a layer's inner state, of all experts that a token uses."""
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return int(width * experts) if isinstance(width, int) else 4 * int(config.hidden_size)


def max_context(config: Any, calls: list[AttentionProbe]) -> int:
    """The longest context in which what is computed does not depend on the length of the other texts in a batch."""
    longest = int(config.max_position_embeddings)
    kinds = getattr(config, "layer_types", None) or []
    for kind, call in zip(kinds, calls, strict=False):
        if kind == "sliding_attention" and call.window is None:
            longest = min(longest, int(config.sliding_window))
        if kind == "chunked_attention":
            longest = min(longest, int(config.attention_chunk_size))
    if (
        calls
        and not kinds
        and all(call.window is None for call in calls)
        and getattr(config, "use_sliding_window", True)
    ):
        longest = min(longest, getattr(config, "sliding_window", None) or longest)
    return min(longest, *(unscaled_length(rope, longest) for rope in rotations(config)))


def rotations(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of each kind of rotation."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [{}, *(nested or [parameters])]


def unscaled_length(rope: Mapping[str, Any], longest: int) -> int:
    """Up to this length the rotation is the same for every text."""
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return longest
    return int(rope.get("original_max_position_embeddings") or longest)


def adaptable_modules(model: Any, products: list[str]) -> tuple[Adaptable, ...]:
    """The linear modules of the layers; in a mixture of experts those of attention only, and then the experts."""
    mixture = any("experts" in path.split(".") for path, _ in model.named_modules())
    modules: dict[tuple[str, int, int], dict[int, str]] = {}
    for path in products:
        found = _IN_A_LAYER.fullmatch(path)
        if found and is_adapted(model, path, has_experts=mixture):
            linear = model.get_submodule(path)
            key = (found["name"], linear.in_features, linear.out_features)
            modules.setdefault(key, {})[int(found["layer"])] = path
    if not modules:
        raise UnsupportedModel("none of its layers has a linear module that an adapter could change")
    names = [name for name, _, _ in modules]
    linears = (
        Adaptable(key, key, inputs, outputs, slice(0, outputs), outputs, paths)
        for (name, inputs, outputs), paths in modules.items()
        # The same name with several sizes is several modules.
        for key in [name if names.count(name) == 1 else f"{inputs}x{outputs}.{name}"]
    )
    return (*linears, *adaptable_experts(model))


def adaptable_experts(model: Any) -> Iterator[Adaptable]:
    """The two parameters of the experts of all layers; nothing if layers differ in their sizes."""
    paths: dict[tuple[Any, ...], dict[int, str]] = {}
    for path, module in model.named_modules():
        if path.endswith(".experts") and has_experts(module):
            for parameter in (GATE_UP, DOWN):
                found = _IN_A_LAYER.fullmatch(f"{path}.{parameter}")
                assert found is not None
                first = inputs_first(module)
                key = (found["name"], first, first and not hasattr(module, "is_transposed"))
                sizes = getattr(module, parameter).shape
                paths.setdefault((*key, *sizes), {})[int(found["layer"])] = found.string
    for (name, first, swapped, experts, *sizes), own in paths.items() if len(paths) == 2 else ():
        inputs, outputs = sizes if first else reversed(sizes)
        yield Adaptable(name, name, inputs, outputs, slice(0, outputs), outputs, own, experts, swapped)


def layer_prefix(path: str) -> str:
    """The name of the layer that a module belongs to: up to the number of the layer."""
    found = _IN_A_LAYER.fullmatch(path)
    assert found is not None
    return path.removesuffix(f".{found['name']}")

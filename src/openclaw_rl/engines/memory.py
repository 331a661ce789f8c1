"""How much GPU memory a model takes for sampling and for training, computed from its config.json alone.

Activations are not counted: they depend on the texts, and engines make them fit.
"""

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from openclaw_rl.engines.options import LINEAR_MODULES

#: Bytes of a float32 number: of trained weights, their gradients, and each of AdamW's two moments.
FLOAT = 4


#: Weights of an output that share a scale, if they are stored in 4 bits.
GROUP = 64
#: The bits of a weight, by --quantize.
BITS = {"none": 0, "8bit": 8, "4bit": 4}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model."""

    matrices: Mapping[tuple[int, ...], int]
    """How many weights of each size [..., inputs] its layers have, of those that --quantize stores in fewer bits."""
    others: int
    """All other weights: the norms, the embedding and the head. Biases are too few to count."""
    adaptable: Mapping[str, int]
    """Inputs and outputs of the linear modules that an adapter can change, added up over all layers, by name."""
    cached: int
    """Numbers that a token has in the cache of keys and values."""
    max_context: int
    bits: int = 0
    """In which the matrices are stored in its folder; 0: as numbers."""
    experts: int = 0
    """Inputs and outputs of what an adapter can change in all experts of all layers, added up."""

    @property
    def parameters(self) -> int:
        return self.others + sum(count * math.prod(shape) for shape, count in self.matrices.items())

    def weight_bytes(self, width: int, bits: int = 0) -> int:
        """With numbers of `width` bytes, and those of the layers in so many bits, or as in its folder."""
        shapes = self.matrices.items()
        return self.others * width + sum(
            count * stored_bytes(shape, width, bits or self.bits) for shape, count in shapes
        )

    def adapter_parameters(self, rank: int, modules: Sequence[str], *, experts: bool = False) -> int:
        """Weights of a LoRA adapter; it is on all modules if all names of the option are given."""
        everywhere = set(modules) == set(LINEAR_MODULES)
        linear = sum(size for name, size in self.adaptable.items() if everywhere or name in modules)
        return rank * (linear + experts * self.experts)

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Keys and values of so many tokens, with numbers of `width` bytes."""
        return self.cached * width * tokens


def stored_bytes(shape: Sequence[int], width: int, bits: int) -> int:
    """Memory of a weight: numbers of `width` bytes, or codes with scales in float32."""
    weights = math.prod(shape)
    if bits == BITS["8bit"]:
        return weights + weights // shape[-1] * FLOAT
    if bits == BITS["4bit"] and shape[-1] % GROUP == 0:
        return weights // 2 + weights // GROUP * FLOAT
    return weights * width


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """What the config.json of some published models says about their sizes, by name, from small to large."""
    return tomllib.loads(Path(__file__).with_name("known_models.toml").read_text())


def read_size(config: Mapping[str, Any]) -> ModelSize | None:
    """The sizes in a config.json of the Llama family; None if it is not of a dense decoder, or lacks some."""
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        inner = int(config["intermediate_size"])
        head_size = int(config.get("head_dim") or hidden // heads)
        query = heads * head_size
        key = int(config.get("num_key_value_heads") or heads) * head_size
        if any(name in config for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
        sides = [(hidden, query), (hidden, key), (hidden, key), (query, hidden), (hidden, inner), (hidden, inner)]
        modules = dict(zip(LINEAR_MODULES, [*sides, (inner, hidden)], strict=True))
        return ModelSize(
            matrices=Counter((outputs, inputs) for inputs, outputs in modules.values() for _ in range(layers)),
            others=embeddings + layers * 2 * hidden + hidden,
            adaptable={name: layers * sum(pair) for name, pair in modules.items()},
            cached=2 * layers * key,
            max_context=int(config["max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one GPU, by what they are for."""

    weights: float = 0
    adapter: float = 0
    gradients: float = 0
    optimiser: float = 0
    kv_cache: float = 0
    """What must fit at least: one request of the longest context."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """By name, as tables and sentences show them."""
        return {field.name.replace("kv_cache", "KV cache"): getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class Trained:
    """What is trained and held: an adapter of some rank, or all weights if the rank is 0."""

    rank: int
    modules: Sequence[str]
    width: int
    """Bytes of a number in the base weights."""
    policies: int
    """Policy versions that a sampler holds in addition to the base model."""
    lines: int = 1
    """Lines of policies that a learner holds."""
    bits: int = 0
    """Of a base weight of a layer; 0: it is a number."""
    experts: bool = False
    """Whether the adapter is on experts too."""

    def adapter_parameters(self, size: ModelSize) -> int:
        return size.adapter_parameters(self.rank, self.modules, experts=self.experts)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process of an engine, and the GPUs of this machine that it uses."""

    name: str
    devices: tuple[int, ...] = ()
    """Empty: those that it chooses itself, or none of this machine."""
    memory: Memory | None = None
    """What it needs on each of its GPUs; None if that is not known."""


def learner_memory(size: ModelSize, trained: Trained, *, ranks: int, sharded: bool, has_weights: bool) -> Memory:
    """Of each learner rank. Without `has_weights`, a sampler on the same GPU shares its base weights.

    Sharding divides the base weights and, if all weights are trained, all that belongs to them. Adapters are small, so
    each rank has a whole one. A step that may be undone keeps a copy of the adapter and its moments.
    """
    shards = ranks if sharded else 1
    base = size.weight_bytes(trained.width, trained.bits) / shards if has_weights else 0
    if trained.rank:
        count = trained.adapter_parameters(size)
        # A line that waits has its adapter and its moments, and no copy of them.
        waiting = (trained.lines - 1) * count * FLOAT
        adapters = count * (2 * FLOAT + trained.width) + waiting
        return Memory(base, adapters, count * FLOAT, 2 * 2 * count * FLOAT + 2 * waiting)
    count = size.parameters
    masters = count * (FLOAT + trained.width) / shards
    return Memory(base + masters, 0, count * FLOAT / shards, 2 * count * FLOAT / shards)


def sampler_memory(size: ModelSize, trained: Trained, *, gpus: int, context: int) -> Memory:
    """Of each GPU of a sampler that splits its model over some."""
    weights = size.weight_bytes(trained.width, trained.bits)
    adapters = 0
    if trained.rank:
        adapters = trained.policies * trained.adapter_parameters(size) * trained.width
    else:
        weights *= 1 + trained.policies
    return Memory(weights / gpus, adapters / gpus, kv_cache=size.cache_bytes(context, trained.width) / gpus)

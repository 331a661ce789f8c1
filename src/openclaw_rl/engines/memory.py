"""How much GPU memory a model takes for sampling and for training, computed from its config.json alone.

Activations are not counted: they depend on the texts, and engines make them fit.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

#: Bytes of a float32 number: of trained weights, their gradients, and each of AdamW's two moments.
FLOAT = 4


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder of the Llama family."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool
    max_context: int

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear modules of a layer."""
        query = self.heads * self.head_size
        key = self.kv_heads * self.head_size
        return {
            "q_proj": (self.hidden, query),
            "k_proj": (self.hidden, key),
            "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def parameters(self) -> int:
        """Weights of the linear modules, the norms, the embedding and the head. Biases are too few to count."""
        linear = sum(inputs * outputs for inputs, outputs in self.modules.values())
        norms = 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        return self.layers * (linear + norms) + self.hidden + embeddings

    def adapter_parameters(self, rank: int, modules: Sequence[str]) -> int:
        """Weights of a LoRA adapter."""
        return self.layers * rank * sum(sum(self.modules[name]) for name in modules)

    def cache_bytes(self, tokens: int, width: int) -> int:
        """Keys and values of so many tokens, with numbers of `width` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_size * width * tokens


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """What the config.json of some published models says about their sizes, by name, from small to large."""
    return tomllib.loads(Path(__file__).with_name("known_models.toml").read_text())


def read_size(config: Mapping[str, Any]) -> ModelSize | None:
    """The sizes in a config.json; None if it is not of a dense decoder, or lacks some."""
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        if any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            return None
        return ModelSize(
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            vocabulary=int(config["vocab_size"]),
            is_tied=bool(config.get("tie_word_embeddings")),
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
    base = size.parameters * trained.width / shards if has_weights else 0
    if trained.rank:
        count = size.adapter_parameters(trained.rank, trained.modules)
        # A line that waits has its adapter and its moments, and no copy of them.
        waiting = (trained.lines - 1) * count * FLOAT
        adapters = count * (2 * FLOAT + trained.width) + waiting
        return Memory(base, adapters, count * FLOAT, 2 * 2 * count * FLOAT + 2 * waiting)
    count = size.parameters
    masters = count * (FLOAT + trained.width) / shards
    return Memory(base + masters, 0, count * FLOAT / shards, 2 * count * FLOAT / shards)


def sampler_memory(size: ModelSize, trained: Trained, *, gpus: int, context: int) -> Memory:
    """Of each GPU of a sampler that splits its model over some."""
    weights = size.parameters * trained.width
    adapters = 0
    if trained.rank:
        adapters = trained.policies * size.adapter_parameters(trained.rank, trained.modules) * trained.width
    else:
        weights *= 1 + trained.policies
    return Memory(weights / gpus, adapters / gpus, kv_cache=size.cache_bytes(context, trained.width) / gpus)

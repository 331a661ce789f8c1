"""Decoders with random weights at real shapes, for measurements without a checkpoint."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Layer, Linear, Shape

QWEN3_4B = Shape(
    vocab=151936,
    hidden=2560,
    intermediate=9728,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    eps=1e-6,
    max_context=40960,
    rotary_layers=(True,) * 36,
    head_norm=True,
)

QWEN3_0_6B = replace(QWEN3_4B, hidden=1024, intermediate=3072, layers=28, heads=16, rotary_layers=(True,) * 28)


def random_decoder(shape: Shape, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Random weights of the right sizes, scaled so that activations stay finite."""

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def layer() -> Layer:
        projections = {name: Linear(normal(*reversed(shape.projection_sizes(name)))) for name in PROJECTIONS}
        norms = {name: ones(shape.head_dim) for name in ("q_norm", "k_norm")} if shape.head_norm else {}
        return Layer(input_norm=ones(shape.hidden), post_norm=ones(shape.hidden), **projections, **norms)

    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    embed = normal(shape.vocab, shape.hidden)
    layers = [layer() for _ in range(shape.layers)]
    return Decoder(shape, embed, layers, ones(shape.hidden), None, 1.0 / 1e6**exponents)


def transformers_model(shape: Shape, device: str) -> Any:
    """The baseline: a model of the same sizes, also with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

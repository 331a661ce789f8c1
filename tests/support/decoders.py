"""A small configuration of every model family that the decoder supports, and the attention to run it with."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

SIZE: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


FAMILIES = {
    "llama": LlamaConfig(**SIZE),
    "llama-scaled-rope": LlamaConfig(**SIZE, rope_parameters=LLAMA3_ROPE),
    "llama-biased-tied": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=32),
    "smollm3": SmolLM3Config(**SIZE, no_rope_layers=[1, 0, 1], pad_token_id=0, bos_token_id=1, eos_token_id=2),
}


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)

"""The decoder computes what Transformers computes, for every family it claims."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from openclaw_rl.engines.local.model.decoder import Shape, UnsupportedModel, load_decoder

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


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    ids = torch.randint(0, 200, (70,))
    with torch.inference_mode():
        logits = ours.logits(ours.forward(ids, torch.arange(70), causal))
        expected = theirs(ids[None]).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_other_families_are_refused_by_name() -> None:
    config = GPT2Config(architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel"):
        Shape.from_config(config)


def test_a_sliding_window_bounds_the_context() -> None:
    config = MistralConfig(**SIZE, sliding_window=128, architectures=["MistralForCausalLM"])
    assert Shape.from_config(config).max_context == 128

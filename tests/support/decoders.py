"""Small random models of many families, and the attention to run our own decoder with."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

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


#: Families of our own decoder.
FAMILIES = {
    "llama": LlamaConfig(**SIZE),
    "llama-scaled-rope": LlamaConfig(**SIZE, rope_parameters=LLAMA3_ROPE),
    "llama-biased-tied": LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "qwen2": Qwen2Config(**SIZE),
    "qwen3": Qwen3Config(**SIZE, head_dim=32),
    "smollm3": SmolLM3Config(**SIZE, no_rope_layers=[1, 0, 1], pad_token_id=0, bos_token_id=1, eos_token_id=2),
}

#: Tokens that exist, with one in three layers that attend to all of the text, and others to a window.
OTHERS: dict[str, Any] = {**SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS: dict[str, Any] = {**OTHERS, "head_dim": 16}
WINDOW: dict[str, Any] = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

#: Families that Transformers' modelling code computes with our attention.
TRANSFORMERS_FAMILIES: dict[str, PreTrainedConfig] = {
    "gemma2": Gemma2Config(
        **HEADS, **WINDOW, query_pre_attn_scalar=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gpt-oss": GptOssConfig(
        **HEADS, **WINDOW, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN, initializer_range=0.2
    ),
    "qwen3-moe": Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=4),
    "phi3": Phi3Config(**OTHERS, sliding_window=24),
    "gemma3": Gemma3TextConfig(**HEADS, **WINDOW, query_pre_attn_scalar=8, rope_parameters=BY_KIND),
    "gemma3-vision": Gemma3Config(
        text_config=Gemma3TextConfig(**HEADS, **WINDOW, query_pre_attn_scalar=8).to_dict(),
        vision_config={
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 28, "patch_size": 14},
        },
    ),
    # Its last two layers attend to the keys of earlier ones.
    "gemma4": Gemma4TextConfig(
        **{**HEADS, "num_hidden_layers": 4},
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        global_head_dim=32,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=200,
    ),
    "llama4": Llama4TextConfig(
        **HEADS, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=192
    ),
    "mixtral": MixtralConfig(**OTHERS, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen2-moe": Qwen2MoeConfig(
        **OTHERS, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32, decoder_sparse_step=2
    ),
    "glm4": Glm4Config(**HEADS),
    "glm4-moe": Glm4MoeConfig(**HEADS, **EXPERTS, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1),
    "deepseek-v3": DeepseekV3Config(
        **{**OTHERS, "num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    "olmo": OlmoConfig(**OTHERS, clip_qkv=0.5),
    "olmo2": Olmo2Config(**OTHERS),
    "olmo3": Olmo3Config(**OTHERS, **WINDOW),
    "granite": GraniteConfig(
        **OTHERS, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "granite-moe": GraniteMoeConfig(**OTHERS, num_local_experts=4, num_experts_per_tok=2, attention_multiplier=0.2),
    "cohere": CohereConfig(**OTHERS, logit_scale=0.3, use_qk_norm=True),
    "cohere2": Cohere2Config(**HEADS, **WINDOW, logit_scale=0.3),
    "starcoder2": Starcoder2Config(**OTHERS, sliding_window=24),
    "ministral": MinistralConfig(**HEADS, **WINDOW),
    "ministral3": Ministral3Config(**HEADS, sliding_window=None),
    "helium": HeliumConfig(**HEADS),
    "nemotron": NemotronConfig(**HEADS, partial_rotary_factor=0.5),
    "exaone4": Exaone4Config(**OTHERS, **WINDOW),
    "seed-oss": SeedOssConfig(**HEADS),
    "arcee": ArceeConfig(**OTHERS),
    "ernie4.5": Ernie4_5Config(**HEADS),
    "hunyuan": HunYuanDenseV1Config(**HEADS),
    "apertus": ApertusConfig(**OTHERS),
    "phi": PhiConfig(**OTHERS, partial_rotary_factor=0.5),
    "gpt-neox": GPTNeoXConfig(**OTHERS),
}

LINEAR: dict[str, Any] = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16}

#: Families for which Transformers keeps a state for each sequence: outside attention, or because attention is its own.
STATE_FAMILIES: dict[str, PreTrainedConfig] = {
    "lfm2": Lfm2Config(**OTHERS, layer_types=["conv", "full_attention", "conv"]),
    "qwen3.5": Qwen3_5TextConfig(**HEADS, **LINEAR),
    "qwen3-next": Qwen3NextConfig(**HEADS, **LINEAR, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    "falcon-h1": FalconH1Config(**HEADS, **MAMBA, mamba_d_ssm=64, mamba_d_head=16),
    "granite-hybrid": GraniteMoeHybridConfig(
        **OTHERS,
        **MAMBA,
        mamba_d_head=32,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "jamba": JambaConfig(
        **OTHERS,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=3,
        attn_layer_offset=1,
        use_mamba_kernels=False,
    ),
    "stablelm": StableLmConfig(**OTHERS),
}

#: Between them: windows, soft caps, sinks, experts and states.
CORE = ("gemma2", "gpt-oss", "lfm2")


def core_and_more(families: Iterable[str], core: Sequence[str] = CORE) -> list[Any]:
    """All families as parameters of a test, those beyond the core for `make test-more`."""
    return [pytest.param(name, marks=() if name in core else pytest.mark.more) for name in families]


def save_random(config: PreTrainedConfig, folder: Path) -> Path:
    """A model whose weights are all different from 0 and 1, also those of norms."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)

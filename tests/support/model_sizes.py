"""The sizes of published models, as their config.json has them."""

from typing import Any

QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
}


def like_qwen(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = True) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return {**QWEN3_4B, **sizes, "num_attention_heads": heads, "tie_word_embeddings": tied}


#: By their names on the Hub.
MODEL_SIZES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        **like_qwen(576, 1536, 30, 9),
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "Qwen/Qwen3-0.6B on the CPU": like_qwen(1024, 3072, 28, 16),
    "Qwen/Qwen3-0.6B": like_qwen(1024, 3072, 28, 16),
    "Qwen/Qwen3-1.7B": like_qwen(2048, 6144, 28, 16),
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3-8B": like_qwen(4096, 12288, 36, 32, tied=False),
}

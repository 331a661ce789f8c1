"""Which models the local engine can run. Other engines may run others."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from openclaw_rl.models import ModelNotFound, complete, read_json_object


class Family(NamedTuple):
    """A family of models in Transformers."""

    model_type: str
    defaults: Mapping[str, object]
    """The values of fields that a config.json may leave out, where they differ between families."""


#: Families whose layers are exactly what the local engine computes. Others would load and then produce nonsense.
SUPPORTED_FAMILIES = {
    "LlamaForCausalLM": Family("llama", {}),
    "MistralForCausalLM": Family("mistral", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(
        "qwen2", {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False}
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", {"num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False, "head_dim": 128}
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
        },
    ),
}


def runnable(folder: Path) -> Path:
    """The folder, if the local engine can run the model in it. Raises ModelNotFound with the reason if not."""
    config = read_json_object(complete(folder) / "config.json")
    families = config.get("architectures")
    family = families[0] if families and isinstance(families, list) else "model without a named family"
    if family not in SUPPORTED_FAMILIES:
        raise ModelNotFound(
            f"{folder} holds a {family}, which the local engine cannot run; it runs {', '.join(SUPPORTED_FAMILIES)}."
        )
    if config.get("quantization_config"):
        raise ModelNotFound(f"{folder} holds quantised weights, which cannot be trained; use the original model.")
    return folder

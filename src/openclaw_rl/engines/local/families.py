"""Which models the local engine can run. Other engines may run others."""

from pathlib import Path

from openclaw_rl.models import ModelNotFound, complete, read_json_object

#: Families whose layers are exactly what the local engine computes. Others would load and then produce nonsense.
SUPPORTED_FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",
)


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

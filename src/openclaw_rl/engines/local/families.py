"""Which models the local engine can run. Other engines may run others."""

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from openclaw_rl.engines.memory import BITS
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


#: Layers that attend, or that are computed as if they did. The others have a state outside attention.
ATTENDING = {"full_attention", "sliding_attention", "chunked_attention"}
#: What a config.json calls the code for a model's configuration and for its computation.
AUTO_CONFIG, CAUSAL_LM = "AutoConfig", "AutoModelForCausalLM"
_IN_ATTENTION = re.compile(r".*\.\w*(attn|attention)\w*\..*")
#: PEFT refuses adapters on a linear module of this name, which kernels for Mamba read past it.
_NOT_BY_PEFT = {("falcon_h1", "out_proj"), ("nemotron_h", "out_proj")}


def has_own_decoder(config: Mapping[str, object]) -> bool:
    """Whether our own decoder computes the model of this config.json; if not, Transformers' modelling code may."""
    return family_of(config) in SUPPORTED_FAMILIES


def family_of(config: Mapping[str, object]) -> str:
    families = config.get("architectures")
    return str(families[0]) if families and isinstance(families, list) else "model without a named family"


def runnable(folder: Path, *, trusts_code: bool = False) -> Path:
    """The folder, if the local engine can run the model in it. Raises ModelNotFound with the reason if not.

    Code in the folder is never run here. `trusts_code`: whether the processes that load the model may run it.
    """
    config = read_json_object(complete(folder) / "config.json")
    if reason := why_not_decoded(config):
        raise ModelNotFound(f"{folder} holds quantised weights, {reason}; use the original model.")
    if code := needed_code(config):
        if reason := why_not_trusted(folder, config, trusts_code=trusts_code):
            raise ModelNotFound(
                f"{folder} holds a {family_of(config)}, which only its own code {code} knows: {reason}."
            )
    elif not has_own_decoder(config) and (reason := why_not_by_transformers(config)):
        raise ModelNotFound(f"{folder} holds a {family_of(config)}, which the local engine cannot run: {reason}.")
    return folder


def needed_code(config: Mapping[str, object]) -> str:
    """The class of the language model among the code that a folder brings, such as modeling_mine.MyModel.

    Empty if there is none, or if the model is computed without it: then the folder's code is never run.
    """
    brought = config.get("auto_map")
    if not isinstance(brought, dict) or has_own_decoder(config) or model_class(config) is not None:
        return ""
    return str(brought.get(CAUSAL_LM, ""))


def why_not_trusted(folder: Path, config: Mapping[str, object], *, trusts_code: bool) -> str:
    """Why the code that a folder brings may not run, as the end of a sentence; empty if it may."""
    if not trusts_code:
        return (
            "it would run on this machine with all your rights, so read it first, and then allow it with "
            "--trust-remote-code"
        )
    brought = config["auto_map"]
    assert isinstance(brought, dict)
    for name in filter(None, map(brought.get, (AUTO_CONFIG, CAUSAL_LM))):
        if not (folder / f"{str(name).partition('.')[0]}.py").is_file():
            return f"{name} is not in the folder, and code from elsewhere is not fetched: put it there"
    return ""


def quantisation_of(config: Mapping[str, object]) -> Mapping[str, object]:
    """What a config.json says about how the weights are quantised; empty if they are not."""
    settings = config.get("quantization_config")
    return settings if isinstance(settings, dict) else {}


def why_not_decoded(config: Mapping[str, object]) -> str:
    """Why quantised weights cannot be read; empty if they can."""
    settings = quantisation_of(config)
    by = settings.get("quant_method")
    readable = {
        "bitsandbytes": True,
        "fp8": True,
        "mxfp4": True,
        "gptq": settings.get("bits") in (2, 4, 8),
        "awq": settings.get("bits") == 4 and settings.get("version", "gemm") == "gemm",
        "compressed-tensors": settings.get("format") == "float-quantized",
    }
    if not settings or readable.get(str(by)):
        return ""
    return f"in a form of {by} that is not read here" if by in readable else f"by {by}, which is not read here"


def stored_bits(config: Mapping[str, object]) -> int:
    """The bits of quantised weights that stay as they are stored; 0 if they are decoded when they are loaded."""
    settings = quantisation_of(config)
    if settings.get("quant_method") != "bitsandbytes":
        return 0
    if settings.get("load_in_4bit"):
        return BITS["4bit"] if settings.get("bnb_4bit_quant_type") == "nf4" else 0
    return BITS["8bit"] if settings.get("load_in_8bit") else 0


def model_class(config: Mapping[str, object]) -> Any:
    """The language model that Transformers has for a config.json; None if it has none."""
    # Importing Transformers takes seconds.
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")), "")
    # Some models that see images have a language model of its own name for their text part.
    stems = {
        name.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration") for name in (known, family_of(config))
    }
    return getattr(transformers, known, None) if len(stems) == 1 else None


def is_adapted(model: Any, path: str, *, has_experts: bool) -> bool:
    """Whether a linear module of the layers may have an adapter: in a mixture of experts, if it is of attention."""
    kind = model.config.get_text_config().model_type
    refused = (kind, path.rpartition(".")[2]) in _NOT_BY_PEFT
    return not refused and (not has_experts or _IN_ATTENTION.fullmatch(f"{path}.") is not None)


def keeps_state(config: Mapping[str, object], model: Any) -> bool:
    """Whether Transformers keeps a state for each sequence of a model of this class: it has some outside attention, or
    its attention cannot be replaced by ours. Then sequences share nothing."""
    text = config.get("text_config")
    kinds = (text if isinstance(text, dict) else config).get("layer_types")
    has_other_layers = isinstance(kinds, list) and not ATTENDING.issuperset(kinds)
    return has_other_layers or model._is_stateful or not model._supports_attention_backend


def why_not_by_transformers(config: Mapping[str, object]) -> str:
    """Why Transformers' modelling code cannot compute the model; empty if it can, as far as the configuration tells."""
    model = model_class(config)
    if model is None:
        import transformers

        return f"Transformers {transformers.__version__} has no language model of this name and model_type"
    return "" if takes_state(model) else "its code in Transformers keeps the state of a text in a form of its own"


def takes_state(model: Any) -> bool:
    """Whether a class of models takes the state of a text as Transformers' models do."""
    return "past_key_values" in inspect.signature(model.forward).parameters


def describe_family(folder: Path) -> str:
    """What computes the model, what that allows, and how its weights are read if they are quantised."""
    config = read_json_object(folder / "config.json")
    return " ".join(filter(None, (describe_computation(config), describe_weights(config))))


def describe_weights(config: Mapping[str, object]) -> str:
    by = quantisation_of(config).get("quant_method")
    if not by:
        return ""
    if stored_bits(config):
        return f"Its weights stay as {by} has stored them."
    return f"Its weights, which {by} has quantised, are decoded to the precision of --dtype when they are loaded."


def describe_computation(config: Mapping[str, object]) -> str:
    shared = "prefix cache, packed training, shared beginnings, several adapters in a batch"
    everywhere = f"{shared}, --quantize, CUDA graphs"
    here = "--lora-rank 0, --shard-weights"
    if has_own_decoder(config):
        return f"{family_of(config)} is computed by our own decoder. It has {everywhere}, {here}."
    import transformers

    if code := needed_code(config):
        return (
            f"{family_of(config)} is computed by code of its own, {code}, which runs in the worker processes only "
            f"(--trust-remote-code). It is refused there if its log-probs differ from its own without our parts. "
            f"It has --quantize; not {here}."
        )
    computed = f"{family_of(config)} is computed by the code of Transformers {transformers.__version__}"
    adapters = (
        "Adapters: on all linear modules, in a mixture of experts on those of attention, and with --lora-experts on "
        "the experts too, without CUDA graphs."
    )
    if keeps_state(config, model_class(config)):
        return (
            f"{computed}, which keeps a state for each sequence. It is slower: sequences are computed one after "
            f"another, and each reads its whole text. It has --quantize; not {shared}, CUDA graphs, {here}. {adapters}"
        )
    return f"{computed} with our attention. It has {everywhere}; not {here}. {adapters}"

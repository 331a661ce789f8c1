"""Reads what the decoder needs from a model's config.json.

Transformers' own reader would take most of a worker's start. A test compares the two.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)
from torch import Tensor

from openclaw_rl.engines.local.families import SUPPORTED_FAMILIES, Family
from openclaw_rl.models import BadModelFolder, read_json_object

#: A longer reason from another library is cut.
MAX_REASON_CHARACTERS = 200


class UnsupportedModel(ValueError):
    """This engine cannot run the checkpoint; the message says why."""


class RotaryFrequencies(NamedTuple):
    """How queries and keys are rotated to their positions."""

    inverse: Tensor
    """[head_dim / 2]"""
    scale: float = 1.0
    """Of the cosines and sines."""


class ModelConfig(BaseModel):
    """The fields of config.json that decide what the decoder computes, under their names in the file."""

    model_config = ConfigDict(strict=True, frozen=True, protected_namespaces=())

    architectures: list[str] = Field(min_length=1)
    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: NonNegativeInt | None = None
    """Some files write 0 for none, here and in `sliding_window`."""
    hidden_act: Literal["silu", "swish"] = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: PositiveInt
    sliding_window: NonNegativeInt | None = None
    use_sliding_window: bool = True
    no_rope_layers: list[bool | int] | None = None
    no_rope_layer_interval: PositiveInt | None = None
    tie_word_embeddings: bool = False
    rope_theta: float = 10_000.0
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    """The name of `rope_parameters` in older files."""
    dtype: str | None = Field(None, validation_alias=AliasChoices("dtype", "torch_dtype"))

    @field_validator("dtype")
    @classmethod
    def _is_a_type_of_torch(cls, name: str | None) -> str | None:
        if name is not None and not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name} is not a type of PyTorch")
        return name

    @property
    def family(self) -> str:
        return self.architectures[0]

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def max_context(self) -> int:
        window = self.sliding_window if self.use_sliding_window else None
        return min(self.max_position_embeddings, window or self.max_position_embeddings)

    @property
    def rotary_layers(self) -> tuple[bool, ...]:
        """Per layer, whether queries and keys are rotated."""
        interval = self.no_rope_layer_interval if self.family == "SmolLM3ForCausalLM" else None
        computed = [not interval or (i + 1) % interval != 0 for i in range(self.num_hidden_layers)]
        return tuple(bool(rotated) for rotated in self.no_rope_layers or computed)

    def rotary_frequencies(self, folder: Path, device: torch.device) -> RotaryFrequencies:
        """How this model rotates. Raises UnsupportedModel."""
        parameters = self.rope_scaling or self.rope_parameters or {}
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind in ("dynamic", "longrope"):
            # Their frequencies change with the length of the text, so keys cached for a shorter text would be wrong.
            raise UnsupportedModel(f"rope type {kind} cannot be run with a cache of prefixes")
        is_flat = not parameters.keys().isdisjoint(("rope_type", "type", "rope_theta"))
        if not is_flat and any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModel("its layers rotate in different ways, which the local engine cannot do")
        if kind != "default":
            return frequencies_of_transformers(folder, device)
        theta = parameters.get("rope_theta", self.rope_theta)
        if not isinstance(theta, int | float):
            raise unusable(folder, f"rope_theta is no number: {theta}")
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32, device=device) / self.head_size
        return RotaryFrequencies(1.0 / theta**exponents)


def frequencies_of_transformers(folder: Path, device: torch.device) -> RotaryFrequencies:
    """Compute the frequencies of a scaled rotation with Transformers. Raises UnsupportedModel."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        frequencies, scale = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, device)
    except Exception as error:
        # Transformers raises errors of many types for values that it cannot use; some go on for paragraphs.
        raise unusable(folder, str(error)) from error
    return RotaryFrequencies(frequencies.float(), float(scale))


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration of a model folder. Raises UnsupportedModel if the decoder would compute the model wrongly."""
    try:
        content = read_json_object(folder / "config.json")
        family = SUPPORTED_FAMILIES[known_family(content.get("architectures"))]
        config = ModelConfig.model_validate({**family.defaults, **content})
    except BadModelFolder as error:
        raise UnsupportedModel(str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise unusable(folder, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    check_consistent(folder, config, family)
    return config


def known_family(architectures: Any) -> str:
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown"
    if name not in SUPPORTED_FAMILIES:
        raise UnsupportedModel(
            f"{name} is not a model family of our own decoder, which computes {', '.join(SUPPORTED_FAMILIES)}"
        )
    return name


def check_consistent(folder: Path, config: ModelConfig, family: Family) -> None:
    if config.model_type != family.model_type:
        raise unusable(folder, f"model_type is {config.model_type}, but {config.family} is {family.model_type}")
    if not config.head_dim and config.hidden_size % config.num_attention_heads:
        raise unusable(folder, "hidden_size is not a multiple of num_attention_heads")
    if config.head_size % 2:
        raise unusable(folder, f"heads of an odd size ({config.head_size}) cannot be rotated")
    if len(config.rotary_layers) < config.num_hidden_layers:
        raise unusable(folder, "no_rope_layers has fewer entries than there are layers")


def unusable(folder: Path, reason: str) -> UnsupportedModel:
    short = " ".join(reason.split())[:MAX_REASON_CHARACTERS]
    return UnsupportedModel(f"the config.json in {folder} cannot be used: {short}")

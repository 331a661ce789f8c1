"""Trained LoRA factors on top of frozen base weights, in PEFT's format on disk.

The masters are float32, for every dtype of the base weights. Each micro-batch computes with copies in the activations'
dtype, and gradients flow through these to the masters.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Decoder, Projection, Shape, write_tensors
from openclaw_rl.engines.local.model.ops import activation_dtype
from openclaw_rl.engines.local.model.policy_slots import MODULES, BadPolicy, read_adapter
from openclaw_rl.engines.local.training.blocks import LowRank
from openclaw_rl.engines.local.training.trainer import Policy
from openclaw_rl.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS

ALL_MODULES = tuple(name for names in MODULES.values() for name in names)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of an adapter's input. The mask is drawn from a seed, so that it does not have to be kept."""

    rate: float
    seed: int

    def __call__(self, like: Tensor) -> Tensor:
        generator = torch.Generator(like.device).manual_seed(self.seed)
        kept = torch.rand(like.shape, generator=generator, device=like.device) >= self.rate
        return kept.to(like.dtype) / (1 - self.rate)


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The factors of each module, with all layers in one tensor, so that an optimiser step is a few kernels."""

    shape: Shape
    rank: int
    alpha: float
    dropout: float
    a: dict[str, Tensor]
    """By module [layers, rank, in], float32."""
    b: dict[str, Tensor]
    """By module [layers, out, rank], float32."""

    @classmethod
    def create(
        cls,
        shape: Shape,
        rank: int,
        alpha: float,
        modules: Sequence[str] = ALL_MODULES,
        dropout: float = 0.0,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> "LoraWeights":
        """A new adapter that does not change the model yet: PEFT's initialisation, drawn on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        a = {}
        b = {}
        for name in fused_order(modules):
            n_in, n_out = module_sizes(shape)[name]
            # Kaiming's bound with a = √5.
            bound = n_in**-0.5
            drawn = torch.empty(shape.layers, rank, n_in).uniform_(-bound, bound, generator=generator)
            a[name] = drawn.to(device).requires_grad_()
            b[name] = torch.zeros(shape.layers, n_out, rank, device=device, requires_grad=True)
        return cls(shape, rank, alpha, dropout, a, b)

    @classmethod
    def load(cls, folder: Path, shape: Shape, device: torch.device | None = None) -> "LoraWeights":
        """Read a PEFT folder; raises BadPolicy if it does not fit the model or leaves some layers out."""
        config, tensors = read_adapter(folder)
        rank = config["r"]
        alpha = config["lora_alpha"] * (rank**0.5 if config.get("use_rslora") else 1)
        a = {}
        b = {}
        for name in fused_order({name for _, name in tensors}):
            factors = [tensors.get((layer, name)) for layer in range(shape.layers)]
            n_in, n_out = module_sizes(shape)[name]
            for layer, pair in enumerate(factors):
                if pair is None or (pair["A"].shape, pair["B"].shape) != ((rank, n_in), (n_out, rank)):
                    raise BadPolicy(
                        f"{folder}: {name} of layer {layer} is missing or has the wrong size for this model"
                    )
            a[name], b[name] = (
                torch.stack([pair[side].float() for pair in factors if pair]).to(device).requires_grad_()
                for side in ("A", "B")
            )
        if len(tensors) != len(a) * shape.layers:
            raise BadPolicy(f"{folder} adapts layers that this model does not have")
        return cls(shape, rank, alpha, config.get("lora_dropout", 0.0), a, b)

    def complete(self) -> "LoraWeights":
        return self

    def save(self, folder: Path, base_model: str) -> None:
        """Write the masters as a PEFT folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for side, stacked in (("A", self.a), ("B", self.b)):
            for name, tensor in stacked.items():
                for layer, factor in enumerate(tensor.detach().cpu().unbind(0)):
                    tensors[f"base_model.model.{module_path(layer, name)}.lora_{side}.weight"] = factor.clone()
        write_tensors(tensors, folder / ADAPTER_WEIGHTS)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(self.a),
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    def parameters(self) -> list[Tensor]:
        """The masters, in an order that depends only on the modules."""
        return [*self.a.values(), *self.b.values()]

    def decoder(self, base: Decoder) -> Decoder:
        return base

    def policy(self, base: Decoder, dropout_seed: int | None = None) -> Policy:
        return Policy(base, self.adapters(activation_dtype(base.embed), dropout_seed))

    def adapters(self, dtype: torch.dtype, dropout_seed: int | None = None) -> list[dict[Projection, LowRank]]:
        """Each layer's factors for one forward and backward pass; without a seed there is no dropout."""
        layers: list[dict[Projection, LowRank]] = [{} for _ in range(self.shape.layers)]
        for number, (projection, names) in enumerate(MODULES.items()):
            present = [name for name in names if name in self.a]
            if not present:
                continue
            # Unbinding one tensor of all layers collects its gradient once instead of once per layer.
            downs = torch.cat([self.a[name] for name in present], dim=1).to(dtype).unbind(0)
            ups = self._ups(projection, present, dtype).unbind(0)
            for i, (layer, down, up) in enumerate(zip(layers, downs, ups, strict=True)):
                dropout = None
                if dropout_seed is not None and self.dropout:
                    dropout = Dropout(self.dropout, (dropout_seed * self.shape.layers + i) * len(MODULES) + number)
                layer[projection] = LowRank(down, up, dropout)
        return layers

    def _ups(self, projection: Projection, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """[layers, modules * rank, out]: each module in its own rows and columns, so that one product adds them all."""
        columns = module_columns(self.shape, projection)
        width = self.shape.projection_sizes(projection)[1]
        scaled = [(self.alpha / self.rank * self.b[name]).to(dtype).transpose(1, 2) for name in names]
        padding = [(columns[name].start, width - columns[name].stop) for name in names]
        return torch.cat([F.pad(up, around) for up, around in zip(scaled, padding, strict=True)], dim=1)


def fused_order(modules: Sequence[str] | set[str]) -> list[str]:
    """The named modules in the order in which the decoder fuses them."""
    if unknown := sorted(set(modules) - set(ALL_MODULES)):
        raise BadPolicy(f"{', '.join(unknown)} cannot be adapted; these can: {', '.join(ALL_MODULES)}")
    return [name for name in ALL_MODULES if name in modules]


def module_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """(input, output) width of every module."""
    widths = {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
    widths |= {"gate_proj": shape.intermediate, "up_proj": shape.intermediate}
    widths |= {"o_proj": shape.hidden, "down_proj": shape.hidden}
    return {
        name: (shape.projection_sizes(projection)[0], widths[name])
        for projection, names in MODULES.items()
        for name in names
    }


def module_columns(shape: Shape, projection: Projection) -> dict[str, slice]:
    """The columns of each module in a projection's fused output."""
    sizes = module_sizes(shape)
    columns = {}
    start = 0
    for name in MODULES[projection]:
        columns[name] = slice(start, start + sizes[name][1])
        start += sizes[name][1]
    return columns


def module_path(layer: int, name: str) -> str:
    """A module's name in a Transformers model."""
    part = "self_attn" if name in (*MODULES["qkv"], *MODULES["o"]) else "mlp"
    return f"model.layers.{layer}.{part}.{name}"

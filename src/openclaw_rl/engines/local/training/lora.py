"""Trained LoRA factors on top of frozen base weights, in PEFT's format on disk.

The masters are float32, for every dtype of the base weights. Each micro-batch computes with copies in the activations'
dtype, and gradients flow through these to the masters.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import write_tensors
from openclaw_rl.engines.local.model.language_model import Adaptable, LanguageModel, Projection, Sizes
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, peft_tensors, read_adapter
from openclaw_rl.engines.local.training.blocks import LowRank
from openclaw_rl.engines.local.training.trainer import DecoderInParts, Policy
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS


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
    """The factors of each module, with all its layers in one tensor, so that an optimiser step is a few kernels."""

    shape: Sizes
    modules: tuple[Adaptable, ...]
    """Those that are adapted."""
    rank: int
    alpha: float
    dropout: float
    a: dict[str, Tensor]
    """By module [layers, rank, in], of experts [layers, experts, rank, in]; float32."""
    b: dict[str, Tensor]
    """By module [layers, out, rank], of experts [layers, experts, out, rank]; float32."""

    @classmethod
    def create(
        cls,
        shape: Sizes,
        rank: int,
        alpha: float,
        modules: Sequence[str] = LINEAR_MODULES,
        dropout: float = 0.0,
        seed: int = 0,
        device: torch.device | None = None,
        *,
        experts: bool = False,
    ) -> "LoraWeights":
        """A new adapter that does not change the model yet: PEFT's initialisation, drawn on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        a = {}
        b = {}
        adapted = choose_modules(shape, modules, experts=experts)
        for module in adapted:
            of_a, of_b = ((len(module.paths), *sizes) for sizes in module.factor_shapes(rank))
            # Kaiming's bound with a = √5.
            bound = of_a[-1] ** -0.5
            a[module.name] = torch.empty(of_a).uniform_(-bound, bound, generator=generator).to(device).requires_grad_()
            b[module.name] = torch.zeros(of_b, device=device, requires_grad=True)
        return cls(shape, adapted, rank, alpha, dropout, a, b)

    @classmethod
    def load(cls, folder: Path, shape: Sizes, device: torch.device | None = None) -> "LoraWeights":
        """Read a PEFT folder; raises BadPolicy if it does not fit the model or leaves some layers out."""
        config, tensors = read_adapter(folder)
        rank = config["r"]
        alpha = config["lora_alpha"] * (rank**0.5 if config.get("use_rslora") else 1)
        a = {}
        b = {}
        adapted = tuple(module for module in shape.adaptable if not tensors.keys().isdisjoint(module.paths.values()))
        for module in adapted:
            pairs = [tensors.pop(path, {}) for path in module.paths.values()]
            sizes = dict(zip("AB", module.factor_shapes(rank), strict=True))
            for path, pair in zip(module.paths.values(), pairs, strict=True):
                if {side: tuple(factor.shape) for side, factor in pair.items()} != sizes:
                    raise BadPolicy(f"{folder}: {path} is missing or has the wrong size for this model")
            a[module.name], b[module.name] = (
                torch.stack([pair[side].float() for pair in pairs]).to(device).requires_grad_() for side in ("A", "B")
            )
        if tensors:
            raise BadPolicy(f"{folder} adapts {next(iter(tensors))}, which this model does not have or cannot adapt")
        return cls(shape, adapted, rank, alpha, config.get("lora_dropout", 0.0), a, b)

    def complete(self) -> "LoraWeights":
        return self

    def save(self, folder: Path, base_model: str) -> None:
        """Write the masters as a PEFT folder."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for module in self.modules:
            pairs = zip(*(stacked[module.name].detach().cpu() for stacked in (self.a, self.b)), strict=True)
            for path, (a, b) in zip(module.paths.values(), pairs, strict=True):
                tensors |= {key: factor.clone() for key, factor in peft_tensors(path, a, b).items()}
        write_tensors(tensors, folder / ADAPTER_WEIGHTS)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": list(dict.fromkeys(module.target for module in self.modules if not module.experts)),
            "target_parameters": [module.name for module in self.modules if module.experts] or None,
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

    def decoder(self, base: LanguageModel | DecoderInParts) -> LanguageModel | DecoderInParts:
        return base

    def policy(self, base: LanguageModel | DecoderInParts, dropout_seed: int | None = None) -> Policy:
        return Policy(base, self.adapters(base.activation_dtype, dropout_seed))

    def adapters(self, dtype: torch.dtype, dropout_seed: int | None = None) -> list[dict[Projection, LowRank]]:
        """Each layer's factors for one forward and backward pass; without a seed there is no dropout."""
        layers: list[dict[Projection, LowRank]] = [{} for _ in range(self.shape.layers)]
        projections = list(dict.fromkeys(module.projection for module in self.shape.adaptable))
        for projection, grouped in groupby(self.modules, key=lambda module: module.projection):
            modules = list(grouped)
            # Unbinding one tensor of all layers collects its gradient once instead of once per layer.
            factors = [(module, *module.in_order(self.a[module.name], self.b[module.name])) for module in modules]
            downs = torch.cat([down for _, down, _ in factors], dim=-2).to(dtype).unbind(0)
            ups = torch.cat([self._up(module, up, dtype) for module, _, up in factors], dim=-2).unbind(0)
            for i, down, up in zip(modules[0].paths, downs, ups, strict=True):
                dropout = None
                if dropout_seed is not None and self.dropout:
                    number = (dropout_seed * self.shape.layers + i) * len(projections) + projections.index(projection)
                    dropout = Dropout(self.dropout, number)
                layers[i][projection] = LowRank(down, up, dropout)
        return layers

    def _up(self, module: Adaptable, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """[layers, …, rank, width]: in the module's own columns, so that one product adds all modules."""
        scaled = (self.alpha / self.rank * factor).to(dtype).mT
        return F.pad(scaled, (module.columns.start, module.width - module.columns.stop))


def choose_modules(shape: Sizes, targets: Sequence[str], *, experts: bool = False) -> tuple[Adaptable, ...]:
    """The modules of these names, in the model's order, and if asked for those of experts. Raises BadPolicy.

    All names that --lora-target-modules knows stand for all-linear: every linear module that can be adapted.
    """
    possible = list(dict.fromkeys(module.target for module in shape.adaptable if not module.experts))
    wanted = possible if set(targets) == set(LINEAR_MODULES) else targets
    if unknown := sorted(set(wanted) - set(possible)):
        raise BadPolicy(f"{', '.join(unknown)} cannot be adapted; these can: {', '.join(possible)}")
    if experts and not any(module.experts for module in shape.adaptable):
        raise BadPolicy("the model has no experts that an adapter could change")
    return tuple(module for module in shape.adaptable if (experts if module.experts else module.target in wanted))

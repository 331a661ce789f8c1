"""What a sampler holds for each policy version: a LoRA adapter on top of the base weights, or a whole model.

Slot 0 is the base model. It stays loaded for the judge and the teacher. The modules that a product computes together
have their first factors stacked, for they have the same input. With `--lora-rank 0` each policy takes as much memory as
the base model.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Decoder, TensorFiles, take_apart
from openclaw_rl.engines.local.model.experts import DOWN, GATE_UP, grouped
from openclaw_rl.engines.local.model.language_model import Adapt, Adaptable, ExpertRows, Projection, Sizes
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.shared_weights import map_leaves
from openclaw_rl.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BadModelFolder, read_json_object

_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.(?:\w+\.)?weight")
#: How PEFT's files name the parameters of experts: it wraps the module once for each, the first one innermost.
_EXPERT_KEYS = {f".experts.{GATE_UP}": ".experts.base_layer", f".experts.{DOWN}": ".experts"}


class BadPolicy(ValueError):
    """The folder does not hold a policy that fits this model; the message says why."""


@dataclass(frozen=True, slots=True)
class Factors:
    """One projection of one layer, for all slots.

    The result of `down` has `rank` columns for each module, and `up` takes those of the module that a row of it is of.
    """

    down: Tensor
    """[slots, modules * rank, in]; of experts [slots, experts, rank, in]"""
    up: Tensor
    """[slots, out, rank]; of experts [slots, experts, out, rank]"""
    columns: tuple[slice, ...]
    """The part of the projection's result that each module computes."""

    @property
    def rank(self) -> int:
        return self.up.shape[2]

    @property
    def ends(self) -> tuple[int, int]:
        """Where the first and the second module end, as the kernels take it: they know at most three."""
        first, second, *_rest = *(part.stop for part in self.columns), self.up.shape[1], self.up.shape[1]
        return first, second


class AdapterSlots:
    """Memory for `slots` adapters of at most `rank`, allocated when the first adapter is loaded; that of experts when
    the first adapter with experts is."""

    def __init__(self, shape: Sizes, slots: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.slots = slots
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self._modules: list[dict[Projection, list[Adaptable]]] = [{} for _ in range(shape.layers)]
        for module in shape.adaptable:
            for layer in module.paths:
                self._modules[layer].setdefault(module.projection, []).append(module)
        self._factors: list[dict[Projection, Factors]] = [{} for _ in range(shape.layers)]
        self.adapts_experts = False

    def load(self, slot: int, folder: Path) -> Iterator[None]:
        """Load a PEFT adapter folder into a slot: in one go, or layer by layer if it is on experts too. Raises
        BadPolicy, with no change, if it does not fit."""
        config, modules = read_adapter(folder)
        scale = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])
        if config["r"] > self.rank:
            raise BadPolicy(f"{folder} has rank {config['r']}, more than --lora-rank {self.rank}")
        self._check(folder, modules)
        self.adapts_experts |= any(pair["A"].dim() > 2 for pair in modules.values())
        layers = self._fill(slot, modules, scale)
        if not self.adapts_experts:
            # It is small.
            list(layers)
        return layers

    def model(self, slot: int) -> Decoder | None:
        """A slot's own decoder: none, because all adapters use the base weights."""
        return None

    def adapt(self, spans: Sequence[tuple[int, int, int]]) -> Adapt | None:
        """The adapter function of a batch. A span (start, stop, slot) gives the slot of the tokens [start, stop)."""
        active = [span for span in spans if span[2]]
        return SpanAdapters(self._factors, active) if active else None

    def factors(self, layer: int, projection: Projection) -> Factors:
        """The adapters of all slots."""
        return self._factors[layer][projection]

    def _room(self, modules: Sequence[Adaptable]) -> Factors:
        options: Any = {"dtype": self.dtype, "device": self.device}
        down, up = (torch.zeros(self.slots, *shape, **options) for shape in self._shapes(modules))
        return Factors(down, up, tuple(module.columns for module in modules))

    def _shapes(self, modules: Sequence[Adaptable]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the two factors of a projection, for a slot."""
        each = (modules[0].experts,) if modules[0].experts else ()
        return (*each, self.rank * len(modules), modules[0].inputs), (*each, modules[0].width, self.rank)

    def _check(self, folder: Path, modules: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise BadPolicy unless the model has all of these modules, in these sizes."""
        known = {path: module for module in self.shape.adaptable for path in module.paths.values()}
        for path, pair in modules.items():
            if path not in known:
                raise BadPolicy(f"{folder} adapts {path}, which this model does not have or cannot adapt")
            rank = pair["A"].shape[-2]
            if (pair["A"].shape, pair["B"].shape) != known[path].factor_shapes(rank) or rank > self.rank:
                raise BadPolicy(f"{path} has the wrong size for this model")

    def _fill(self, slot: int, modules: Mapping[str, Mapping[str, Tensor]], scale: float) -> Iterator[None]:
        """Write the factors of a slot, a layer per iteration. Modules that have none there get zeros."""
        for layer, rooms in enumerate(self._factors):
            for projection, parts in self._modules[layer].items():
                if parts[0].experts and not self.adapts_experts:
                    continue
                if projection not in rooms:
                    rooms[projection] = self._room(parts)
                down, up = map(torch.zeros, self._shapes(parts))
                for i, module in enumerate(parts):
                    if pair := modules.get(module.paths[layer]):
                        a, b = module.in_order(pair["A"].float(), pair["B"].float())
                        rank = a.shape[-2]
                        down[..., i * self.rank : i * self.rank + rank, :] = a
                        up[..., module.columns, :rank] = scale * b
                rooms[projection].down[slot - 1].copy_(down)
                rooms[projection].up[slot - 1].copy_(up)
            yield


@dataclass(frozen=True, slots=True)
class SpanAdapters:
    """Adds the adapter of each span (start, stop, slot) of a batch, in place."""

    factors: Sequence[dict[Projection, Factors]]
    spans: Sequence[tuple[int, int, int]]

    def has(self, layer: int, projection: Projection) -> bool:
        return projection in self.factors[layer]

    def __call__(
        self, layer: int, projection: Projection, x: Tensor, y: Tensor, rows: ExpertRows | None = None
    ) -> Tensor:
        factors = self.factors[layer][projection]
        for start, stop, slot in self.spans:
            down, up = factors.down[slot - 1], factors.up[slot - 1]
            if rows is not None:
                own = ((rows.tokens >= start) & (rows.tokens < stop)).nonzero().flatten()
                ends = torch.searchsorted(own, rows.ends.long(), out_int32=True)
                inner = grouped(x[own], down, ends, outputs_first=True)
                y.index_add_(0, own, grouped(inner, up, ends, outputs_first=True))
                continue
            parts = (x[start:stop] @ down.t()).chunk(len(factors.columns), dim=1)
            for part, columns in zip(parts, factors.columns, strict=True):
                y[start:stop, columns].addmm_(part, up[columns].t())
        return y


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """A PEFT folder's config, and its factors by the name of the module. Raises BadPolicy."""
    if (folder / "config.json").exists() and not (folder / ADAPTER_CONFIG).exists():
        raise BadPolicy(
            f"{folder} holds a whole model and not an adapter: use --lora-rank 0 to continue from it, or start over "
            "with --resume-from-ckpt none"
        )
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise BadPolicy(f"{folder} is not a PEFT adapter folder: {folder / name} is missing")
    try:
        config = read_json_object(folder / ADAPTER_CONFIG)
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (BadModelFolder, OSError, ValueError, SafetensorError) as error:
        raise BadPolicy(f"{folder} is damaged: {str(error).removesuffix('.')}") from error
    for setting in ("use_dora", "rank_pattern", "alpha_pattern"):
        if config.get(setting):
            raise BadPolicy(f"{folder} uses {setting}, which the local engine does not compute")
    if config.get("bias", "none") != "none":
        raise BadPolicy(f"{folder} has trained biases, which the local engine does not compute")
    if not all(isinstance(config.get(name), int | float) and config[name] > 0 for name in ("r", "lora_alpha")):
        raise BadPolicy(f"{folder} is damaged: its config has no rank or no alpha")
    return config, by_module(folder, tensors, int(config["r"]))


def by_module(folder: Path, tensors: dict[str, Tensor], rank: int) -> dict[str, dict[str, Tensor]]:
    """The two factors of each module, or of each parameter of experts: [experts, rank, …] and [experts, …, rank]."""
    modules: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise BadPolicy(f"{folder} holds {key}, which is not a LoRA factor of a linear layer")
        name, side = match.groups()
        modules.setdefault(name, {})[side] = tensor
    for name, factors in modules.items():
        if factors.keys() != {"A", "B"} or any(factor.dim() != 2 for factor in factors.values()):
            raise BadPolicy(f"{folder} is damaged: {name} lacks a factor")
    for parameter, key in _EXPERT_KEYS.items():
        for name in [name for name in modules if name.endswith(key)]:
            modules[name.removesuffix(key) + parameter] = by_expert(folder, name, modules.pop(name), rank)
    return modules


def by_expert(folder: Path, name: str, factors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """PEFT keeps those of all experts in one A [experts * rank, …] and one B […, rank * experts]."""
    a, b = factors["A"], factors["B"]
    if not rank or len(a) % rank or b.shape[1] != len(a):
        raise BadPolicy(f"{folder} is damaged: {name} does not fit its rank")
    return {"A": a.view(-1, rank, a.shape[1]), "B": b.view(len(b), rank, -1).movedim(2, 0)}


def peft_tensors(path: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The two factors of a module or of a parameter of experts, as PEFT's files have them."""
    for parameter, key in _EXPERT_KEYS.items():
        if a.dim() > 2 and path.endswith(parameter):
            path = path.removesuffix(parameter) + key
            a, b = a.flatten(0, 1), b.movedim(0, -1).flatten(1)
            break
    factors = {"A": a, "B": b}
    return {f"base_model.model.{path}.lora_{side}.weight": factor.contiguous() for side, factor in factors.items()}


class ModelSlots:
    """Memory for a fixed number of policies in addition to the base model.

    - A slot is allocated when it is first used, and its memory is used again for later policies.
    - A folder that does not fit changes nothing.
    """

    def __init__(self, base: Decoder, slots: int) -> None:
        self.base = base
        self.slots = slots
        self._models: dict[int, Decoder] = {}
        self.adapts_experts = False

    def load(self, slot: int, folder: Path) -> Iterator[None]:
        """Load a model folder into a slot, one tensor per iteration. Raises BadPolicy if the folder does not fit."""
        files = open_model(folder, self.base, self.base.embed.dtype)
        if slot not in self._models:
            self._models[slot] = map_tensors(self.base, torch.empty_like)
        # Always the same memory: captured graphs refer to the weights by address.
        return fill(self._models[slot], files)

    def model(self, slot: int) -> Decoder | None:
        """The weights of a slot; None for the base model."""
        return self._models.get(slot)

    def adapt(self, spans: object) -> Adapt | None:
        return None

    def factors(self, layer: int, projection: Projection) -> Factors:
        raise AssertionError("a policy that trains all weights has no adapter")


def map_tensors(decoder: Decoder, change: Callable[[Tensor], Tensor]) -> Decoder:
    """A decoder with `change` applied to each weight."""
    constants: Any = {"inverse_frequencies": None}
    changed: Decoder = map_leaves(replace(decoder, **constants), Tensor, change)
    return replace(changed, inverse_frequencies=decoder.inverse_frequencies)


def open_model(folder: Path, base: Decoder, dtype: torch.dtype, device: torch.device | None = None) -> TensorFiles:
    """Open a model folder. Raises BadPolicy unless it has every weight of `base`, in the same size.

    The weights are read onto the device of `base`, unless another is given.
    """
    if (folder / ADAPTER_CONFIG).exists():
        raise BadPolicy(
            f"{folder} holds an adapter, but --lora-rank 0 trains all weights: set --lora-rank to the adapter's rank, "
            "or start over with --resume-from-ckpt none"
        )
    try:
        files = TensorFiles(folder, dtype, device or base.embed.device)
    except (UnsupportedModel, OSError, SafetensorError) as error:
        raise BadPolicy(f"{folder} does not hold a model that can be used: {error}") from error
    for name, tensor in take_apart(base).items():
        if files.shape(name) != list(tensor.shape):
            raise BadPolicy(f"{folder} does not fit the base model: {name} is missing or has another size there")
    return files


def fill(decoder: Decoder, files: TensorFiles) -> Iterator[None]:
    """Copy the files' weights into a decoder, one tensor per iteration. Raises BadPolicy."""
    for name, tensor in take_apart(decoder).items():
        try:
            tensor.copy_(files(name))
        except (UnsupportedModel, OSError, SafetensorError) as error:
            raise BadPolicy(f"{name} cannot be read: {error}") from error
        yield

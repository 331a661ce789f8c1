"""Policies whose weights are all their own (`--lora-rank 0`): how they are trained, written, and served.

On disk such a policy is a model folder like any other. In the sampler it takes as much memory as the base model, which
stays there too, for the judge and the teacher.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from openclaw_rl.engines.local.model.adapters import BadPolicy
from openclaw_rl.engines.local.model.decoder import Adapt, Decoder, TensorFiles, UnsupportedModel, take_apart
from openclaw_rl.engines.local.model.shared_weights import map_leaves
from openclaw_rl.engines.local.training.blocks import no_adapters
from openclaw_rl.engines.local.training.trainer import Policy
from openclaw_rl.models import ADAPTER_CONFIG, copy_companion_files

WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class FullWeights:
    """All weights of a model, trained: float32 masters, and copies in the base weights' dtype to compute with."""

    masters: Decoder
    folder: Path
    """Of the base model: its files that are not weights belong to every policy."""
    dropout: float = 0.0

    @classmethod
    def create(cls, base: Decoder, folder: Path) -> "FullWeights":
        """The base model's weights, not yet changed."""
        return cls(map_tensors(base, lambda tensor: tensor.detach().float().clone().requires_grad_()), folder)

    @classmethod
    def load(cls, saved: Path, base: Decoder, folder: Path) -> "FullWeights":
        """What `save` wrote. Raises BadPolicy if it is no model of this shape."""
        read = open_model(saved, base, torch.float32)
        masters = map_tensors(base, lambda tensor: torch.empty_like(tensor, dtype=torch.float32))
        for _ in fill(masters, read):
            pass
        return cls(map_tensors(masters, Tensor.requires_grad_), folder)

    def save(self, folder: Path, base_model: str) -> None:
        """Write a model folder that other programs load."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_companion_files(self.folder, folder)
        for path in folder.glob("*.index.json"):
            path.unlink()  # it lists the base model's files, and here there is one
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in take_apart(self.masters).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    def parameters(self) -> list[Tensor]:
        """The masters, each once, in an order that follows from the model alone."""
        found: dict[int, Tensor] = {}
        map_leaves(self.masters, Tensor, lambda tensor: found.setdefault(id(tensor), tensor))
        return [tensor for tensor in found.values() if tensor.requires_grad]

    def policy(self, base: Decoder, dropout_seed: int | None = None) -> Policy:
        decoder = map_tensors(self.masters, lambda tensor: tensor.to(base.embed.dtype))
        return Policy(dataclasses.replace(decoder, ops=base.ops), no_adapters(base.shape))


class ModelSlots:
    """Fixed room for `slots` policies beside the base model, each allocated when it is first used."""

    def __init__(self, base: Decoder, slots: int) -> None:
        self.base, self.slots = base, slots
        self._models: dict[int, Decoder] = {}

    def load(self, slot: int, folder: Path) -> Iterator[None]:
        """Put a model folder into a slot, a tensor at a time. Nothing changes if the folder is not fit."""
        read = open_model(folder, self.base, self.base.embed.dtype)
        if slot not in self._models:
            self._models[slot] = map_tensors(self.base, torch.empty_like)
        # Into the same memory each time: captured graphs know the weights by their place.
        return fill(self._models[slot], read)

    def model(self, slot: int) -> Decoder | None:
        """The weights that a slot computes with; None for the base model's."""
        return self._models.get(slot)

    def adapt(self, spans: object) -> Adapt | None:
        return None

    def adapt_masked(self, mask: Tensor) -> Adapt:
        raise AssertionError("there is no adapter in a policy that is a whole model")


def map_tensors(decoder: Decoder, change: Callable[[Tensor], Tensor]) -> Decoder:
    """The decoder with each of its weights changed once, also where it is used twice. What is no weight stays."""
    changed: dict[int, Tensor] = {id(decoder.inverse_frequencies): decoder.inverse_frequencies}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    result: Decoder = map_leaves(decoder, Tensor, once)
    return result


def open_model(folder: Path, base: Decoder, dtype: torch.dtype) -> TensorFiles:
    """A folder that has weights for all of `base`. Raises BadPolicy."""
    if (folder / ADAPTER_CONFIG).exists():
        raise BadPolicy(
            f"{folder} holds an adapter, and --lora-rank 0 trains all weights: give the rank that it was trained "
            "with, or begin anew with --resume-from-ckpt none"
        )
    try:
        read = TensorFiles(folder, dtype, base.embed.device)
    except (UnsupportedModel, OSError, SafetensorError) as error:
        raise BadPolicy(f"{folder} does not hold a model that can be used: {error}") from error
    for name, tensor in take_apart(base).items():
        if read.shape(name) != list(tensor.shape):
            raise BadPolicy(f"{folder} does not fit the base model: {name} is missing or has another size there")
    return read


def fill(decoder: Decoder, read: TensorFiles) -> Iterator[None]:
    """Write the files' weights into a decoder's, a tensor at a time. Raises BadPolicy."""
    for name, tensor in take_apart(decoder).items():
        try:
            tensor.copy_(read(name))
        except (UnsupportedModel, OSError, SafetensorError) as error:
            raise BadPolicy(f"{name} cannot be read: {error}") from error
        yield

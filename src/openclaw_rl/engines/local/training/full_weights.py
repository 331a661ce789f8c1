"""Training all weights of a model (`--lora-rank 0`). On disk such a policy is an ordinary model folder."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Decoder, take_apart, write_tensors
from openclaw_rl.engines.local.model.policy_slots import fill, map_tensors, open_model
from openclaw_rl.engines.local.model.shared_weights import map_leaves
from openclaw_rl.engines.local.training.blocks import no_adapters
from openclaw_rl.engines.local.training.trainer import Policy
from openclaw_rl.models import copy_companion_files

WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class FullWeights:
    """All weights of a model, in training: float32 masters, and copies in the base weights' dtype for each pass."""

    masters: Decoder
    folder: Path
    """The base model's folder. Its files other than the weights are copied to every policy."""
    dropout: float = 0.0

    @classmethod
    def create(cls, base: Decoder, folder: Path) -> "FullWeights":
        """The base model's weights, unchanged."""
        return cls(map_tensors(base, lambda tensor: tensor.detach().float().clone().requires_grad_()), folder)

    @classmethod
    def load(cls, saved: Path, base: Decoder, folder: Path) -> "FullWeights":
        """Load what `save` wrote. Raises BadPolicy if it is not a model of this shape."""
        read = open_model(saved, base, torch.float32)
        masters = map_tensors(base, lambda tensor: torch.empty_like(tensor, dtype=torch.float32))
        for _ in fill(masters, read):
            pass
        return cls(map_tensors(masters, Tensor.requires_grad_), folder)

    def complete(self) -> "FullWeights":
        return self

    def save(self, folder: Path, base_model: str) -> None:
        """Write a model folder that other programs load."""
        folder.mkdir(parents=True, exist_ok=True)
        copy_companion_files(self.folder, folder)
        for path in folder.glob("*.index.json"):
            path.unlink()  # it lists the base model's weight files; here there is only one
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in take_apart(self.masters).items()}
        write_tensors(tensors, folder / WEIGHTS)

    def parameters(self) -> list[Tensor]:
        """The masters, in an order that depends only on the model."""
        tensors: list[Tensor] = []
        map_leaves(self.masters, Tensor, tensors.append)
        return [tensor for tensor in tensors if tensor.requires_grad]

    def decoder(self, base: Decoder) -> Decoder:
        return self.masters

    def policy(self, base: Decoder, dropout_seed: int | None = None) -> Policy:
        decoder = map_tensors(self.masters, lambda tensor: tensor.to(base.embed.dtype))
        return Policy(decoder, no_adapters(base.shape))

"""The sampler's copies of policies whose weights are all trained (`--lora-rank 0`).

Each takes as much memory as the base model, which stays loaded for the judge and the teacher.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from openclaw_rl.engines.local.model.adapters import BadPolicy
from openclaw_rl.engines.local.model.decoder import Adapt, Decoder, Projection, TensorFiles, take_apart
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.shared_weights import map_leaves
from openclaw_rl.models import ADAPTER_CONFIG


class ModelSlots:
    """Memory for a fixed number of policies beside the base model.

    - A slot is allocated when it is first used, and its memory is used again for later policies.
    - A folder that does not fit changes nothing.
    """

    def __init__(self, base: Decoder, slots: int) -> None:
        self.base, self.slots = base, slots
        self._models: dict[int, Decoder] = {}

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

    def adapt_masked(self, mask: Tensor) -> Adapt:
        raise AssertionError("a policy that trains all weights has no adapter")

    def factors(self, layer: int, projection: Projection) -> tuple[Tensor, Tensor]:
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

"""One copy of the base weights for several processes: the sampler shares what it loaded, the learner takes it up.

On Linux CPUs the weights are moved into anonymous shared memory, which is gone with the last process that has it,
however that ends. On CUDA they stay where they are and are opened through the driver. Elsewhere every process has
its own.
"""

import dataclasses
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Decoder

#: Where a tensor begins: what the fastest instructions like.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in the shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """A decoder whose tensors are places in a file that only processes have."""

    path: str
    size: int
    skeleton: Any


def share(decoder: Decoder) -> tuple[Decoder, bytes | None]:
    """The decoder with its weights where others can reach them, and what they need for it; None if nobody can."""
    if decoder.embed.is_cuda:
        import torch.multiprocessing  # noqa: F401 - teaches the pickler about tensors on CUDA

        return decoder, bytes(ForkingPickler.dumps(dataclasses.replace(decoder, ops=None)))
    if not hasattr(os, "memfd_create"):
        return decoder, None
    return _share_memory(decoder)


def take_up(shared: bytes) -> Decoder:
    """The decoder that another process has shared, without a copy of its weights."""
    found = pickle.loads(shared)
    if isinstance(found, SharedMemory):
        storage = torch.UntypedStorage.from_file(found.path, shared=True, nbytes=found.size)
        found = map_leaves(found.skeleton, Place, lambda place: _view(storage, place))
    from openclaw_rl.engines.local.model import ops

    decoder: Decoder = dataclasses.replace(found, ops=ops)
    return decoder


def _share_memory(decoder: Decoder) -> tuple[Decoder, bytes]:
    places: dict[int, Place] = {}
    size = 0

    def place(tensor: Tensor) -> Place:
        """Room for a tensor; weights that are used twice have one place."""
        nonlocal size
        if tensor.data_ptr() not in places:
            places[tensor.data_ptr()] = Place(size, tuple(tensor.shape), tensor.dtype)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return places[tensor.data_ptr()]

    skeleton = map_leaves(dataclasses.replace(decoder, ops=None), Tensor, place)
    # The descriptor stays open as long as this process lives: others open it by this very path.
    number = os.memfd_create("openclaw-rl-weights", os.MFD_CLOEXEC)
    os.ftruncate(number, size)
    path = f"/proc/{os.getpid()}/fd/{number}"
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)

    def move(tensor: Tensor) -> Tensor:
        view = _view(storage, places[tensor.data_ptr()])
        return view.copy_(tensor)

    moved = map_leaves(dataclasses.replace(decoder, ops=None), Tensor, move)
    shared = pickle.dumps(SharedMemory(path, size, skeleton))
    return dataclasses.replace(moved, ops=decoder.ops), shared


def _view(storage: Any, place: Place) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    count = torch.Size(place.shape).numel() * place.dtype.itemsize
    return whole[place.offset : place.offset + count].view(place.dtype).view(place.shape)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested dataclasses and lists with every leaf of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list):
        return [map_leaves(item, kind, change) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_leaves(getattr(value, f.name), kind, change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value

"""One copy of the base weights for several processes of a machine: the sampler shares it, the learner opens it.

On Linux CPUs the weights are moved into anonymous shared memory. The kernel frees it when the last process that uses it
ends, also after a crash. On CUDA the weights stay where they are and are opened through the driver. Elsewhere, also
on Apple GPUs, every process has its own copy.
"""

import dataclasses
import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.engines.host import SHARES_MEMORY, host_id
from openclaw_rl.engines.local.model.language_model import LanguageModel

#: Tensors start at multiples of this many bytes, as vector instructions need.
ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in the shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """An anonymous file in memory, and a decoder that has a `Place` in it instead of each tensor."""

    path: str
    size: int
    skeleton: Any


@dataclasses.dataclass(frozen=True, slots=True)
class SharedFrom:
    """Weights that a process shares, and which processes can open them."""

    host: str
    gpu: str
    """The GPU that they are on; empty on a CPU."""
    content: bytes


def share(decoder: LanguageModel) -> tuple[LanguageModel, bytes | None]:
    """The decoder with shared weights, and the bytes with which `take_up` opens it (None if it cannot be shared)."""
    if decoder.embed.is_cuda:
        import torch.multiprocessing  # noqa: F401 - teaches the pickler about tensors on CUDA

        handles = bytes(ForkingPickler.dumps(decoder))
        return decoder, pickle.dumps(SharedFrom(host_id(), gpu_id(decoder.embed.device), handles))
    if not SHARES_MEMORY or decoder.embed.device.type != "cpu":
        return decoder, None
    return _share_memory(decoder)


def take_up(shared: bytes) -> LanguageModel | None:
    """Open the decoder that another process has shared, without copying its weights.

    None if they are on another machine, or on a GPU that is not the first one of this process.
    """
    origin: SharedFrom = pickle.loads(shared)
    if origin.host != host_id() or (origin.gpu and origin.gpu != gpu_id(torch.device("cuda", 0))):
        return None
    content = pickle.loads(origin.content)
    if isinstance(content, SharedMemory):
        storage = torch.UntypedStorage.from_file(content.path, shared=True, nbytes=content.size)
        content = _with_views(content.skeleton, storage)
    decoder: LanguageModel = content
    return decoder


def _share_memory(decoder: LanguageModel) -> tuple[LanguageModel, bytes]:
    tensors: list[Tensor] = []
    size = 0

    def place(tensor: Tensor) -> Place:
        nonlocal size
        reserved = Place(size, tuple(tensor.shape), tensor.dtype)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        tensors.append(tensor)
        return reserved

    skeleton = map_leaves(decoder, Tensor, place)
    # The descriptor stays open until this process ends, because others open the memory through its path.
    number = os.memfd_create("openclaw-rl-weights", os.MFD_CLOEXEC)
    os.ftruncate(number, size)
    path = f"/proc/{os.getpid()}/fd/{number}"
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=size)
    remaining = iter(tensors)
    moved = map_leaves(_with_views(skeleton, storage), Tensor, lambda view: view.copy_(next(remaining)))
    shared = SharedFrom(host_id(), "", pickle.dumps(SharedMemory(path, size, skeleton)))
    return moved, pickle.dumps(shared)


def gpu_id(device: torch.device) -> str:
    """What a GPU is called in every process, whichever number it has there; empty if there is no such GPU."""
    if (device.index or 0) >= torch.cuda.device_count():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def _with_views(skeleton: Any, storage: Any) -> Any:
    """A decoder whose tensors are views of the shared memory."""
    return map_leaves(skeleton, Place, lambda place: _view(storage, place))


def _view(storage: Any, place: Place) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    count = torch.Size(place.shape).numel() * place.dtype.itemsize
    return whole[place.offset : place.offset + count].view(place.dtype).view(place.shape)


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dataclasses and lists, with `change` applied to every leaf of a kind."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list):
        return [map_leaves(item, kind, change) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_leaves(getattr(value, f.name), kind, change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value

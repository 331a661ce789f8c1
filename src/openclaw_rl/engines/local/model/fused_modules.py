"""Parts of Transformers' modules as one kernel each, on CUDA: norms, and the rotation of queries and keys.

Modelling code computes a norm with seven kernels and a rotation with ten, forward alone. A part is replaced only if the
replacement gives the same numbers for random inputs.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclaw_rl.engines.local.model import kernels

#: Replacements may differ by this share of the largest result: modelling code rounds in between.
MAX_ERROR = 0.02
#: What modelling files call the rotation of queries and keys, and its parameters.
ROTATION, PARAMETERS = "apply_rotary_pos_emb", ("q", "k", "cos", "sin")
#: The size of the heads with which rotations are compared.
HEAD = 32
Rotation = Callable[..., tuple[Tensor, Tensor]]
_as_written: ContextVar[bool] = ContextVar("as_written", default=False)


@contextmanager
def as_written() -> Iterator[None]:
    """Compute everything as modelling code has it."""
    token = _as_written.set(True)
    try:
        yield
    finally:
        _as_written.reset(token)


@torch.no_grad()  # tensors of the inference mode could not be trained through
def fuse(model: nn.Module) -> None:
    """Replace what can be replaced in a model on CUDA."""
    offsets: dict[type[nn.Module], float | None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        if type(module) not in offsets:
            offsets[type(module)] = offset_of(module, weight)
        offset = offsets[type(module)]
        if offset is not None:
            gain = weight.detach() if not offset else weight.float() + offset
            replaced = partial(norm_or_original, module.forward, gain, eps_of(module))
            setattr(module, "forward", replaced)  # noqa: B010 - it is a method
    for file in {sys.modules[kind.__module__] for kind in map(type, model.modules())}:
        fuse_rotation(file, model)


def offset_of(module: nn.Module, weight: Tensor) -> float | None:
    """What a norm adds to its weight; None if it computes something else."""
    x = torch.randn(4, len(weight), dtype=weight.dtype, device=weight.device)
    wanted = module(x)
    for offset in (0.0, 1.0):
        if agree(norm(weight.float() + offset, eps_of(module), x), wanted):
            return offset
    return None


def agree(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= MAX_ERROR * wanted.abs().max())


def eps_of(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))


def norm_or_original(original: Callable[[Tensor], Tensor], gain: Tensor, eps: float, x: Tensor) -> Tensor:
    return original(x) if _as_written.get() else norm(gain, eps, x)


def norm(gain: Tensor, eps: float, x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        # With an offset, 16 bits have no room for the gain.
        wide = torch.promote_types(x.dtype, gain.dtype)
        return F.rms_norm(x.to(wide), (x.shape[-1],), gain, eps).to(x.dtype)
    return kernels.rms_norm(x.reshape(-1, x.shape[-1]), gain, eps).view(x.shape)


def fuse_rotation(file: ModuleType, model: nn.Module) -> None:
    """Replace the rotation of a modelling file, whose attention looks it up there, if ours computes the same."""
    original: Any = getattr(file, ROTATION, None)
    if not inspect.isfunction(original) or tuple(inspect.signature(original).parameters)[:4] != PARAMETERS:
        return
    for width in (HEAD, HEAD // 2):
        replaced = partial(rotate, original, HEAD // width)
        if same_rotation(original, replaced, next(model.parameters()), width):
            setattr(file, ROTATION, replaced)
            return


def same_rotation(original: Rotation, replaced: Rotation, like: Tensor, width: int) -> bool:
    """Whether two functions turn heads alike, by angles for whole heads, or for their first half alone."""
    q, k, angles = (
        torch.randn(1, *size, dtype=like.dtype, device=like.device)
        for size in ((4, 3, HEAD), (2, 3, HEAD), (3, HEAD // 2))
    )
    cos, sin = (part.repeat(1, 1, 2)[..., :width] for part in (angles.cos(), angles.sin()))
    try:
        wanted = original(q, k, cos, sin)
    except RuntimeError:  # it takes angles of the other width
        return False
    return all(map(agree, replaced(q, k, cos, sin), wanted))


def rotate(original: Rotation, parts: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The rotation of [1, heads, tokens, dim] by angles [1, tokens, dim / parts].

    Anything else is computed as modelling code has it.
    """
    if len(args) == 4 and not kwargs and not torch.is_grad_enabled() and not _as_written.get() and fits(parts, *args):
        q, k, cos, sin = (part[0] for part in args)
        return kernels.rotate(q, cos, sin)[None], kernels.rotate(k, cos, sin)[None]
    return original(*args, **kwargs)


def fits(parts: int, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if not q.is_cuda or q.dim() != 4 or cos.dim() != 3:
        return False
    tokens, width = cos.shape[1:]
    # Angles for fewer dimensions turn a part of each head.
    heads = all(len(one) == 1 and one.shape[2:] == (tokens, parts * width) and one.stride(-1) == 1 for one in (q, k))
    return heads and len(cos) == 1 and cos.shape == sin.shape and cos.stride() == sin.stride() and cos.stride(-1) == 1

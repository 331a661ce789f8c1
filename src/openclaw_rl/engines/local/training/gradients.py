"""The backward passes of `ops.py`, as functions of the gradient and the forward pass's input.

Each returns the result of the forward pass beside the gradient, so that a caller that kept only the input gets both in
one pass over it. Arithmetic is in float32, results are in the input's dtype.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.model import ops

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function into one kernel on CUDA, at its first call; on other devices it stays as it is."""

    @functools.cache
    def compiled() -> Callable[P, R]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        on_cuda = isinstance(args[0], Tensor) and args[0].is_cuda
        return (compiled() if on_cuda else function)(*args, **kwargs)

    return call


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    unit = wide * inverse
    scaled = grad.float() * weight
    back = (scaled - unit * (scaled * unit).mean(dim=-1, keepdim=True)) * inverse
    return (unit * weight).to(x.dtype), back.to(x.dtype)


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)


@fused
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, gradient of `x`)"""
    return norm_gradient(grad, x, weight, eps)


@fused
def silu_mul(gate_up: Tensor) -> Tensor:
    return ops.silu_mul(gate_up)


@fused
def silu_mul_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, gradient of `gate_up`)"""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    return silu * up, torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * silu), dim=-1)


@fused
def turn_heads(
    qkv: Tensor, counts: tuple[int, int, int], cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """Normalise (if there are norms) and rotate queries and keys of heads [tokens, queries + keys + values, dim]."""
    q, k, v = qkv.split_with_sizes(counts, dim=1)
    q_norm, k_norm = norms or (None, None)
    return torch.cat((ops.norm_rotate(q, cos, sin, q_norm, eps), ops.norm_rotate(k, cos, sin, k_norm, eps), v), dim=1)


@fused
def turn_heads_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Gradient of `qkv`, which is needed only if there are norms: the inverse rotation depends only on the angles."""
    # A rotation's transpose is the rotation by the opposite angle.
    back = [ops.rotate(grad, cos, -sin).to(grad.dtype) for grad in (grad_q, grad_k)]
    if norms is not None and qkv is not None:
        heads = qkv.split_with_sizes((grad_q.shape[1], grad_k.shape[1], grad_v.shape[1]), dim=1)
        back = [norm_gradient(*pair, eps)[1] for pair in zip(back, heads[:2], norms, strict=True)]
    return torch.cat((*back, grad_v), dim=1)

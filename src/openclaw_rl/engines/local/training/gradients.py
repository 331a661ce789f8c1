"""The operations of `ops.py` for training, and their backward passes.

A backward pass is a function of the gradient and the forward pass's input. It returns the result of the forward pass
with the gradient, so that a caller that kept only the input gets both in one pass over it. Arithmetic is in float32,
results are in the input's dtype. On CUDA these are kernels; forward passes that autograd records are compiled.
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


def has_kernel(tensor: Tensor) -> bool:
    """Whether a kernel computes the function: on CUDA, where autograd does not record it."""
    return tensor.is_cuda and not torch.is_grad_enabled()


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    unit = wide * inverse
    scaled = grad.float() * weight
    back = (scaled - unit * (scaled * unit).mean(dim=-1, keepdim=True)) * inverse
    return (unit * weight).to(x.dtype), back.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if has_kernel(x):
        from openclaw_rl.engines.local.model import kernels

        return kernels.rms_norm(x, weight, eps)
    return recorded_rms_norm(x, weight, eps)


@fused
def recorded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.rms_norm(x, weight, eps)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, gradient of `x`)"""
    if has_kernel(x):
        from openclaw_rl.engines.local.training import gradient_kernels

        return gradient_kernels.rms_norm_backward(grad, x, weight, eps)
    return norm_gradient(grad, x, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    if has_kernel(gate_up):
        from openclaw_rl.engines.local.model import kernels

        return kernels.silu_mul(gate_up)
    return recorded_silu_mul(gate_up)


@fused
def recorded_silu_mul(gate_up: Tensor) -> Tensor:
    return ops.silu_mul(gate_up)


def silu_mul_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, gradient of `gate_up`)"""
    if has_kernel(gate_up):
        from openclaw_rl.engines.local.training import gradient_kernels

        return gradient_kernels.silu_mul_backward(grad, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    silu = F.silu(gate)
    return silu * up, torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * silu), dim=-1)


def turn_heads(
    qkv: Tensor, counts: tuple[int, int, int], cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    """Normalise (if there are norms) and rotate queries and keys of heads [tokens, queries + keys + values, dim]."""
    if has_kernel(qkv):
        from openclaw_rl.engines.local.training import gradient_kernels

        return gradient_kernels.turn_heads(qkv, counts, cos, sin, norms, eps)
    return recorded_turn_heads(qkv, counts, cos, sin, norms, eps)


@fused
def recorded_turn_heads(
    qkv: Tensor, counts: tuple[int, int, int], cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
) -> Tensor:
    q, k, v = qkv.split_with_sizes(counts, dim=1)
    q_norm, k_norm = norms or (None, None)
    return torch.cat((ops.norm_rotate(q, cos, sin, q_norm, eps), ops.norm_rotate(k, cos, sin, k_norm, eps), v), dim=1)


def turn_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Gradient of `qkv`, which is needed only if there are norms: the inverse rotation depends only on the angles."""
    if has_kernel(grads[0]):
        from openclaw_rl.engines.local.training import gradient_kernels

        return gradient_kernels.turn_heads_backward(grads, qkv, cos, sin, norms, eps)
    # A rotation's transpose is the rotation by the opposite angle.
    back = [ops.rotate(grad, cos, -sin).to(grad.dtype) for grad in grads[:2]]
    if norms is not None and qkv is not None:
        heads = qkv.split_with_sizes([grad.shape[1] for grad in grads], dim=1)
        back = [norm_gradient(*pair, eps)[1] for pair in zip(back, heads[:2], norms, strict=True)]
    return torch.cat((*back, grads[2]), dim=1)

"""The operations between the matrix products of a decoder, in PyTorch.

This module is the reference. It runs on every device, with gradients. `kernels.py` has the same functions as fused
Triton kernels for sampling on CUDA; tests compare the two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def activation_dtype(weights: Tensor) -> torch.dtype:
    """The precision of everything between the products: that of the weights on CUDA, at least float32 on a CPU."""
    on_cuda = weights.device.type == "cuda"
    return weights.dtype if on_cuda else torch.promote_types(weights.dtype, torch.float32)


def embedding(ids: Tensor, weights: Tensor) -> Tensor:
    """The residual stream before the first layer."""
    return F.embedding(ids, weights).to(activation_dtype(weights))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` times a weight [out, in], in the precision of `x`.

    Weights may be narrower than `x`, on a CPU. Then `x` and the result are rounded to their precision, and the sums
    are in float32.
    """
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


def linear_backward(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input of `linear`, with the same rounding."""
    return (grad.to(weight.dtype) @ weight).to(grad.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, then norm the sum: (normed, new residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for a fused projection whose halves are [gate, up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, dim] with angles [tokens, dim / 2], in the angles' precision."""
    first, second = heads.chunk(2, dim=-1)
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def norm_rotate(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm each head if a weight is given (Qwen3), then rotate it to its position."""
    if weight is not None:
        heads = rms_norm(heads, weight, eps)
    return rotate(heads, cos, sin).to(heads.dtype)

"""The operations between the matrix products of a decoder, in plain PyTorch.

This module is the reference. It runs on every device, with gradients. `kernels.py` has the same functions as fused
Triton kernels for sampling on CUDA; tests compare the two.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


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
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def norm_rotate(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm each head if a weight is given (Qwen3), then rotate it to its position."""
    if weight is not None:
        heads = rms_norm(heads, weight, eps)
    return rotate(heads, cos, sin).to(heads.dtype)

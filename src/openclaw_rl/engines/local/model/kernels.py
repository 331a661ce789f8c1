"""The operations of `ops.py` as fused Triton kernels.

For sampling on CUDA: no gradients. Launches and allocations depend only on shapes, never on values, so every function
can be captured in a CUDA graph once a first call has compiled it. Arithmetic is fp32. Where the reference rounds a sum,
norm or gate to the tensors' dtype, the kernels round too, so that sampler and trainer agree. The last dimension of a
tensor must be contiguous.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.chaining import chained, wait_for_previous

SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of the rows of [tokens, width]."""
    require_dense_last(x, weight)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, None, weight, eps, normed, None)
    return normed


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add `x` to the residual stream, then norm the sum: (normed, new residual)."""
    require_dense_last(x, residual, weight)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, residual, weight, eps, normed, total)
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for a fused projection [tokens, 2 * width] whose halves are [gate, up]."""
    require_dense_last(gate_up)
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (tokens, triton.cdiv(width, SILU_BLOCK))
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=SILU_BLOCK, **chained(gate_up))
    return out


def _launch_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, total: Tensor | None
) -> None:
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        normed,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADD=residual is not None,
        # Sixteen elements per thread: two 16-byte loads of a 16-bit dtype.
        num_warps=min(max(block // 512, 1), 16),
        **chained(x),
    )


def require_dense_last(*tensors: Tensor) -> None:
    """Check that the last dimension is contiguous, as the kernels assume. Raises ValueError."""
    if any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in tensors):
        raise ValueError("the last dimension must be contiguous")


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program norms one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(CHAINED)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    result = value * inverse * gain
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """One program covers `BLOCK` columns of one row."""
    wait_for_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = gate_up + row * row_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (silu * up).to(out.dtype.element_ty), mask=inside)

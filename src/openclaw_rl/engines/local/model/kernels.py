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

SILU_BLOCK = 1024

# Eight heads have at least 64 elements for every head size from 16 up. With no more threads than elements, Triton gives
# each element one owner, so rotating in place has no races.
HEADS_BLOCK = 8
HEADS_WARPS = 2


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
    _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=SILU_BLOCK)
    return out


def norm_rotate(heads: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Norm each head of [tokens, heads, dim] if a weight is given, then rotate it: in place, and returned.

    `heads` may be a view into a wider buffer, whose other elements do not change. The angles are [tokens, dim / 2], as
    in `ops.rotate`.
    """
    require_dense_last(heads, cos, sin)
    tokens, count, dim = heads.shape
    _norm_rotate_kernel[(tokens, triton.cdiv(count, HEADS_BLOCK))](
        heads,
        cos,
        sin,
        weight,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        sin.stride(0),
        eps,
        HEADS=count,
        HALF=dim // 2,
        HEADS_BLOCK=HEADS_BLOCK,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        NORM=weight is not None,
        num_warps=HEADS_WARPS,
    )
    return heads


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
):
    """One program norms one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    result = value * inverse * gain
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, row_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program covers `BLOCK` columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = gate_up + row * row_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate_kernel(
    heads,
    cos,
    sin,
    weight,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program rotates `HEADS_BLOCK` heads of one token."""
    dtype = heads.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    lane = tl.arange(0, HALF_BLOCK)
    in_half = lane < HALF
    inside = (head < HEADS)[:, None] & in_half[None, :]
    first_at = heads + token * token_stride + head[:, None] * head_stride + lane[None, :]
    second_at = first_at + HALF
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first_gain = tl.load(weight + lane, mask=in_half, other=0.0).to(tl.float32)
        second_gain = tl.load(weight + HALF + lane, mask=in_half, other=0.0).to(tl.float32)
        power = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        inverse = tl.rsqrt(power + eps)[:, None]
        first = (first * inverse * first_gain[None, :]).to(dtype).to(tl.float32)
        second = (second * inverse * second_gain[None, :]).to(dtype).to(tl.float32)
    cosine = tl.load(cos + token * cos_stride + lane, mask=in_half, other=0.0)[None, :]
    sine = tl.load(sin + token * sin_stride + lane, mask=in_half, other=0.0)[None, :]
    tl.store(first_at, (first * cosine - second * sine).to(dtype), mask=inside)
    tl.store(second_at, (second * cosine + first * sine).to(dtype), mask=inside)

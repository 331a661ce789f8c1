"""The operations of `ops.py` as fused Triton kernels, and the heads on their way into attention and cache.

For sampling on CUDA: no gradients. Launches and allocations depend only on shapes, never on values, so every function
can be captured in a CUDA graph once a first call has compiled it. Arithmetic is fp32. Where the reference rounds a sum,
norm or gate to the tensors' dtype, the kernels round too, so that sampler and trainer agree. The last dimension of a
tensor must be contiguous.

From Hopper on, kernels are chained (programmatic dependent launch): one starts while the one before it still runs. It
may read what no kernel of the chain writes, such as weights, then waits until the one before is done. A step of few
rows is a chain of short kernels, so that the time between them counts.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

#: The first compute capability that can do it.
HOPPER = (9, 0)
SILU_BLOCK = 1024
#: Eight heads have at least 64 elements for every head size from 16 up. With no more threads than elements, Triton
#: gives each element one owner, so rotating in place has no races.
HEADS_BLOCK = 8
HEADS_WARPS = 2


def chained(tensor: Tensor) -> dict[str, Any]:
    """Arguments of a launch whose kernel calls `wait_for_previous` before it reads or writes what others do."""
    possible = tensor.is_cuda and supports_chaining(tensor.device)
    return {"CHAINED": True, "launch_pdl": True} if possible else {"CHAINED": False}


@functools.cache
def supports_chaining(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= HOPPER


@triton.jit
def wait_for_previous(CHAINED: tl.constexpr):
    """Let the next kernel begin, then wait for the end of the one before."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()


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


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [heads, tokens, dim] with angles as modelling code has them: [tokens, dim], or [tokens, half]
    where both halves of a head have the same. In the result the heads of a token lie side by side."""
    require_dense_last(heads, cos, sin)
    count, tokens, dim = heads.shape
    turned = torch.empty((tokens, count, dim), dtype=heads.dtype, device=heads.device)
    _rotate_kernel[(tokens, count)](
        heads,
        cos,
        sin,
        turned,
        heads.stride(0),
        heads.stride(1),
        cos.stride(0),
        count,
        HALF=dim // 2,
        SECOND=cos.shape[1] - dim // 2,
        BLOCK=triton.next_power_of_2(dim // 2),
        num_warps=1,
        **chained(heads),
    )
    return turned.transpose(0, 1)


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
def _rotate_kernel(
    heads,
    cos,
    sin,
    turned,
    head_stride,
    token_stride,
    angle_stride,
    count,
    HALF: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program turns one head of one token. `SECOND`: where the angles of a head's second half begin."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < HALF
    at = heads + head * head_stride + token * token_stride + lane
    out = turned + (token * count + head) * 2 * HALF + lane
    angle = token * angle_stride + lane
    wait_for_previous(CHAINED)
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + angle + SECOND, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + angle + SECOND, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, (first * first_cos - second * first_sin).to(turned.dtype.element_ty), mask=inside)
    tl.store(out + HALF, (second * second_cos + first * second_sin).to(turned.dtype.element_ty), mask=inside)


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


def place_heads(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
) -> Tensor:
    """Norm (if there are norms) and rotate (if there are angles) queries and keys; write keys and values to the cache.

    - `qkv` is [tokens, (query heads + 2 * kv heads) * dim]. Returns a view of its queries [tokens, query heads, dim],
      which are changed in place. Its keys and values stay as they are.
    - The angles are cosines and sines [tokens, dim / 2]. The norms are the weights [dim] for queries and for keys.
    - Pages are contiguous [pages, page_size, kv heads, dim]. A token's slot is `page * page_size + offset`. A token
      with a negative slot is padding and writes nothing to the cache.
    """
    require_dense_last(qkv, slots)
    if not (k_pages.is_contiguous() and v_pages.is_contiguous()):
        raise ValueError("pages must be contiguous")
    kv_heads, dim = k_pages.shape[2:]
    tokens, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    cos, sin = angles or (None, None)
    q_norm, k_norm = norms or (None, None)
    if cos is not None and sin is not None:
        require_dense_last(cos, sin)
    _place_heads_kernel[(tokens, triton.cdiv(heads + 2 * kv_heads, HEADS_BLOCK))](
        qkv,
        cos,
        sin,
        q_norm,
        k_norm,
        k_pages,
        v_pages,
        slots,
        qkv.stride(0),
        0 if cos is None else cos.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        HEADS_BLOCK=HEADS_BLOCK,
        HALF_BLOCK=triton.next_power_of_2(dim // 2),
        NORM=norms is not None,
        ROTATE=angles is not None,
        num_warps=HEADS_WARPS,
        **chained(qkv),
    )
    return qkv[:, : heads * dim].view(tokens, heads, dim)


# fmt: off
@triton.jit
def _place_heads_kernel(
    qkv, cos, sin, q_norm, k_norm, k_pages, v_pages, slots, token_stride, angle_stride, eps, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program takes `HEADS_BLOCK` heads of one token."""
    # fmt: on
    wait_for_previous(CHAINED)
    dtype = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = lane < HALF
    is_query = (head < HEADS) & in_half
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & in_half
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & in_half
    inside = (head < HEADS + 2 * KV_HEADS) & in_half

    first_at = qkv + token * token_stride + head * (2 * HALF) + lane
    raw_first = tl.load(first_at, mask=inside, other=0.0)
    raw_second = tl.load(first_at + HALF, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORM:
        gain_first = tl.load(q_norm + lane + head * 0, mask=is_query, other=0.0).to(tl.float32)
        gain_first += tl.load(k_norm + lane + head * 0, mask=is_key, other=0.0).to(tl.float32)
        gain_second = tl.load(q_norm + HALF + lane + head * 0, mask=is_query, other=0.0).to(tl.float32)
        gain_second += tl.load(k_norm + HALF + lane + head * 0, mask=is_key, other=0.0).to(tl.float32)
        power = tl.sum(first * first + second * second, axis=1) / (2 * HALF)
        inverse = tl.rsqrt(power + eps)[:, None]
        first = (first * inverse * gain_first).to(dtype).to(tl.float32)
        second = (second * inverse * gain_second).to(dtype).to(tl.float32)
    if ROTATE:
        cosine = tl.load(cos + token * angle_stride + lane, mask=in_half, other=0.0)
        sine = tl.load(sin + token * angle_stride + lane, mask=in_half, other=0.0)
        first, second = first * cosine - second * sine, second * cosine + first * sine
    if NORM or ROTATE:
        tl.store(first_at, first.to(dtype), mask=is_query)
        tl.store(first_at + HALF, second.to(dtype), mask=is_query)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        key_at = k_pages + (slot * KV_HEADS + head - HEADS) * (2 * HALF) + lane
        tl.store(key_at, first.to(dtype), mask=is_key)
        tl.store(key_at + HALF, second.to(dtype), mask=is_key)
        value_at = v_pages + (slot * KV_HEADS + head - HEADS - KV_HEADS) * (2 * HALF) + lane
        tl.store(value_at, raw_first, mask=is_value)
        tl.store(value_at + HALF, raw_second, mask=is_value)

"""The functions of `gradients.py` as Triton kernels, for training on CUDA.

A step launches each of them for every layer, and compiled PyTorch functions take longer to launch than to run.
Arithmetic is float32, and results are rounded where those of `kernels.py` are. They have no gradients of their own.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SILU_BLOCK = 1024
HEADS_BLOCK = 8
HEADS_WARPS = 2

Angles = tuple[Tensor, Tensor]
Norms = tuple[Tensor, Tensor]


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, gradient of `x`) for rows [tokens, width]."""
    grad, x = grad.contiguous(), x.contiguous()
    normed, back = torch.empty_like(x), torch.empty_like(x)
    tokens, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_backward_kernel[(tokens,)](
        grad, x, weight, normed, back, eps, WIDTH=width, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )
    return normed, back


def silu_mul_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """(silu(gate) * up, gradient of `gate_up`) for [tokens, 2 * width] whose halves are [gate, up]."""
    grad, gate_up = grad.contiguous(), gate_up.contiguous()
    product, back = torch.empty_like(grad), torch.empty_like(gate_up)
    tokens, width = grad.shape
    _silu_mul_backward_kernel[(tokens, triton.cdiv(width, SILU_BLOCK))](
        grad, gate_up, product, back, WIDTH=width, BLOCK=SILU_BLOCK
    )
    return product, back


def turn_heads(
    qkv: Tensor, counts: tuple[int, int, int], cos: Tensor, sin: Tensor, norms: Norms | None, eps: float
) -> Tensor:
    """Norm (if there are norms) and rotate queries and keys of [tokens, queries + keys + values, dim]."""
    qkv = qkv.contiguous()
    turned = torch.empty_like(qkv)
    q_norm, k_norm = norms or (None, None)
    _turn_heads_kernel[_heads_grid(qkv)](qkv, cos, sin, q_norm, k_norm, turned, eps, **_head_sizes(qkv, counts, norms))
    return turned


def turn_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: Norms | None,
    eps: float,
) -> Tensor:
    """Gradient of `qkv`, which is needed only if there are norms."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    counts = (grad_q.shape[1], grad_k.shape[1], grad_v.shape[1])
    back = torch.empty((len(grad_q), sum(counts), grad_q.shape[2]), dtype=grad_q.dtype, device=grad_q.device)
    q_norm, k_norm = norms or (None, None)
    heads = None if qkv is None else qkv.contiguous()
    _turn_heads_backward_kernel[_heads_grid(back)](
        grad_q, grad_k, grad_v, heads, cos, sin, q_norm, k_norm, back, eps, **_head_sizes(back, counts, norms)
    )
    return back


def _heads_grid(heads: Tensor) -> tuple[int, int]:
    return len(heads), triton.cdiv(heads.shape[1], HEADS_BLOCK)


def _head_sizes(heads: Tensor, counts: tuple[int, int, int], norms: Norms | None) -> dict[str, Any]:
    half = heads.shape[2] // 2
    return {
        "QUERIES": counts[0],
        "KEYS": counts[1],
        "HEADS": sum(counts),
        "HALF": half,
        "HEADS_BLOCK": HEADS_BLOCK,
        "HALF_BLOCK": triton.next_power_of_2(half),
        "NORM": norms is not None,
        "num_warps": HEADS_WARPS,
    }


@triton.jit
def _rms_norm_backward_kernel(grad, x, weight, normed, back, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program takes one row."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * gain
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    unit = value * inverse
    result = (scaled - unit * (tl.sum(scaled * unit, axis=0) / WIDTH)) * inverse
    tl.store(normed + at, (unit * gain).to(normed.dtype.element_ty), mask=inside)
    tl.store(back + at, result.to(back.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_backward_kernel(grad, gate_up, product, back, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program covers `BLOCK` columns of one row."""
    dtype = product.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate_at = row * (2 * WIDTH) + column
    gate = tl.load(gate_up + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = (gate * share).to(dtype).to(tl.float32)
    tl.store(product + row * WIDTH + column, (silu * up).to(dtype), mask=inside)
    tl.store(back + gate_at, (slope * up * share * (1.0 + gate * (1.0 - share))).to(dtype), mask=inside)
    tl.store(back + gate_at + WIDTH, (slope * silu).to(dtype), mask=inside)


@triton.jit
def _gains(q_norm, k_norm, lane, is_query, is_key):
    """The norm's weight for each head: 0 where a head is neither query nor key."""
    query = tl.load(q_norm + lane, mask=is_query, other=0.0).to(tl.float32)
    return query + tl.load(k_norm + lane, mask=is_key, other=0.0).to(tl.float32)


@triton.jit
def _turn_heads_kernel(
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    turned,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program takes `HEADS_BLOCK` heads of one token."""
    dtype = turned.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = lane < HALF
    inside = (head < HEADS) & in_half
    is_value = head >= QUERIES + KEYS
    at = (token * HEADS + head) * (2 * HALF) + lane
    raw_first = tl.load(qkv + at, mask=inside, other=0.0)
    raw_second = tl.load(qkv + at + HALF, mask=inside, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    if NORM:
        is_query, is_key = (head < QUERIES) & in_half, (head >= QUERIES) & (head < QUERIES + KEYS) & in_half
        inverse = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]
        first = (first * inverse * _gains(q_norm, k_norm, lane + head * 0, is_query, is_key)).to(dtype).to(tl.float32)
        second_gain = _gains(q_norm, k_norm, HALF + lane + head * 0, is_query, is_key)
        second = (second * inverse * second_gain).to(dtype).to(tl.float32)
    cosine = tl.load(cos + token * HALF + lane, mask=in_half, other=0.0)
    sine = tl.load(sin + token * HALF + lane, mask=in_half, other=0.0)
    tl.store(turned + at, tl.where(is_value, raw_first, (first * cosine - second * sine).to(dtype)), mask=inside)
    result = tl.where(is_value, raw_second, (second * cosine + first * sine).to(dtype))
    tl.store(turned + at + HALF, result, mask=inside)


@triton.jit
def _load_grads(grad_q, grad_k, grad_v, token, head, lane, in_half, QUERIES, KEYS, VALUES, DIM):
    """The gradient of each head, whichever of the three it belongs to."""
    query = tl.load(grad_q + (token * QUERIES + head) * DIM + lane, mask=(head < QUERIES) & in_half, other=0.0)
    is_key = (head >= QUERIES) & (head < QUERIES + KEYS) & in_half
    key = tl.load(grad_k + (token * KEYS + head - QUERIES) * DIM + lane, mask=is_key, other=0.0)
    is_value = (head >= QUERIES + KEYS) & (head < QUERIES + KEYS + VALUES) & in_half
    value = tl.load(grad_v + (token * VALUES + head - QUERIES - KEYS) * DIM + lane, mask=is_value, other=0.0)
    return query + key + value


@triton.jit
def _turn_heads_backward_kernel(
    grad_q,
    grad_k,
    grad_v,
    qkv,
    cos,
    sin,
    q_norm,
    k_norm,
    back,
    eps,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """One program takes `HEADS_BLOCK` heads of one token. A rotation's transpose is that by the opposite angle."""
    dtype = back.dtype.element_ty
    VALUES: tl.constexpr = HEADS - QUERIES - KEYS
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    lane = tl.arange(0, HALF_BLOCK)[None, :]
    in_half = lane < HALF
    inside = (head < HEADS) & in_half
    is_value = head >= QUERIES + KEYS
    raw_first = _load_grads(grad_q, grad_k, grad_v, token, head, lane, in_half, QUERIES, KEYS, VALUES, 2 * HALF)
    raw_second = _load_grads(grad_q, grad_k, grad_v, token, head, lane + HALF, in_half, QUERIES, KEYS, VALUES, 2 * HALF)
    cosine = tl.load(cos + token * HALF + lane, mask=in_half, other=0.0)
    sine = tl.load(sin + token * HALF + lane, mask=in_half, other=0.0)
    first, second = raw_first.to(tl.float32), raw_second.to(tl.float32)
    first, second = first * cosine + second * sine, second * cosine - first * sine
    at = (token * HEADS + head) * (2 * HALF) + lane
    if NORM:
        is_query, is_key = (head < QUERIES) & in_half, (head >= QUERIES) & (head < QUERIES + KEYS) & in_half
        # Rounded, as the gradient of the rotation's input is.
        first = first.to(dtype).to(tl.float32) * _gains(q_norm, k_norm, lane + head * 0, is_query, is_key)
        second = second.to(dtype).to(tl.float32) * _gains(q_norm, k_norm, HALF + lane + head * 0, is_query, is_key)
        unit_first = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        unit_second = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
        power = tl.sum(unit_first * unit_first + unit_second * unit_second, axis=1) / (2 * HALF)
        inverse = tl.rsqrt(power + eps)[:, None]
        unit_first, unit_second = unit_first * inverse, unit_second * inverse
        shared = (tl.sum(first * unit_first + second * unit_second, axis=1) / (2 * HALF))[:, None]
        first, second = (first - unit_first * shared) * inverse, (second - unit_second * shared) * inverse
    tl.store(back + at, tl.where(is_value, raw_first, first.to(dtype)), mask=inside)
    tl.store(back + at + HALF, tl.where(is_value, raw_second, second.to(dtype)), mask=inside)

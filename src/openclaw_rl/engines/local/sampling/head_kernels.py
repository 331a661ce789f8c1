"""Queries, keys and values on their way from the fused projection into attention and cache, as one Triton kernel.

For sampling on CUDA, with the guarantees of `kernels.py`: launches and allocations follow from shapes alone, so the
function may be captured in a CUDA graph once a first call has compiled it.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.chaining import chained, wait_for_previous
from openclaw_rl.engines.local.model.kernels import require_dense_last

#: Eight heads have at least 64 elements for every head size from 16 up. With no more threads than elements, Triton
#: gives each element one owner, so rotating in place has no races.
HEADS_BLOCK = 8
HEADS_WARPS = 2


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

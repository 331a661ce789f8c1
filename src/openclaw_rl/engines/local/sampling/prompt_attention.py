"""Attention of several prompts at once over a paged key-value cache, as a Triton kernel.

The prompts of a step have different lengths, and each may have a beginning that the cache already holds. One launch
takes them all: the tokens are cut into tiles, and a tile belongs to one prompt.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.kernels import require_dense_last
from openclaw_rl.engines.local.sampling.paged_attention import attend_block

#: Rows of queries in a program: tokens times the query heads that share a kv head.
ROWS_BLOCK = 64
KEYS_BLOCK = 64
WARPS = 4


@dataclass(frozen=True, slots=True)
class PromptRun:
    """The tokens of a prompt that go through the model in this step."""

    place: int
    """Where they begin in the step's run of tokens."""
    start: int
    """The position of the first of them in its sequence."""
    count: int


def tiles(prompts: Sequence[PromptRun], group: int) -> list[tuple[int, int, int, int]]:
    """(row of the page table, place in the run, position, number of tokens) of each tile, longest prompts first.

    `group` is the number of query heads that share a kv head.
    """
    tokens = ROWS_BLOCK // triton.next_power_of_2(group)
    cut = [
        (row, prompt.place + offset, prompt.start + offset, min(tokens, prompt.count - offset))
        for row, prompt in enumerate(prompts)
        for offset in range(0, prompt.count, tokens)
    ]
    # The last tokens of long prompts have the most keys: started last, they would run alone.
    return sorted(cut, key=lambda tile: -tile[2])


def paged_prompts(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, tiles: Tensor, scale: float, out: Tensor
) -> None:
    """Attention of each prompt's tokens to its sequence, up to themselves; the result goes into `out`.

    - `q` and `out` are [tokens, query heads, dim], of the whole run. Only the places of the tiles are written.
    - `tiles` is the function's list, int32 [tiles, 4]. `page_table` is [prompts, pages].
    - Token t of a prompt's sequence lies in page `page_table[prompt, t // page_size]`. The keys and values of the
      step's own tokens are in the cache already. Query head h attends kv head `h // (query heads / kv heads)`.
    """
    require_dense_last(q, page_table, tiles, out)
    if not (k_pages.is_contiguous() and v_pages.is_contiguous() and out.is_contiguous()):
        raise ValueError("pages and result must be contiguous")
    heads, dim = q.shape[1:]
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    group = heads // kv_heads
    _attend_prompts_kernel[(kv_heads, len(tiles))](
        q,
        k_pages,
        v_pages,
        page_table,
        tiles,
        out,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        scale * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        PAGE_SIZE=page_size,
        ROWS_BLOCK=ROWS_BLOCK,
        GROUP_BLOCK=triton.next_power_of_2(group),
        DIM_BLOCK=triton.next_power_of_2(dim),
        KEYS_BLOCK=KEYS_BLOCK,
        num_warps=WARPS,
        # Two blocks of keys and values in shared memory; in float32 only one has room there.
        num_stages=2 if q.dtype.itemsize == 2 else 1,
    )


# Page tables of any width share one compiled kernel: a step must not wait for a compiler.
@triton.jit(do_not_specialize=["table_stride"])
def _attend_prompts_kernel(
    q,
    k_pages,
    v_pages,
    page_table,
    tiles,
    out,
    q_token_stride,
    q_head_stride,
    table_stride,
    log2_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
):
    """One program attends the query heads of one kv head, for the tokens of one tile."""
    kv_head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 4
    table = page_table + tl.load(tile).to(tl.int64) * table_stride
    place = tl.load(tile + 1).to(tl.int64)
    start = tl.load(tile + 2)
    count = tl.load(tile + 3)

    row = tl.arange(0, ROWS_BLOCK)
    token, member = row // GROUP_BLOCK, row % GROUP_BLOCK
    lane = tl.arange(0, DIM_BLOCK)
    in_dim = (lane < DIM)[None, :]
    inside = ((token < count) & (member < GROUP))[:, None] & in_dim
    head = kv_head * GROUP + member
    query_at = q + (place + token)[:, None] * q_token_stride + head[:, None] * q_head_stride + lane[None, :]
    query = tl.load(query_at, mask=inside, other=0.0)

    peak = tl.full([ROWS_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS_BLOCK], tl.float32)
    total = tl.zeros([ROWS_BLOCK, DIM_BLOCK], tl.float32)
    end = start + count
    for block in range(0, end, KEYS_BLOCK):
        position = block + tl.arange(0, KEYS_BLOCK)
        valid = position < end
        page = tl.load(table + position // PAGE_SIZE, mask=valid, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        offset = (slot * KV_HEADS + kv_head)[:, None] * DIM + lane[None, :]
        # Masked to zero, not only weighted by zero: an unwritten slot may hold NaN.
        readable = valid[:, None] & in_dim
        key = tl.load(k_pages + offset, mask=readable, other=0.0)
        value = tl.load(v_pages + offset, mask=readable, other=0.0)
        # Every row sees the first key, so that its peak is finite from the first block on.
        visible = valid[None, :] & (position[None, :] <= (start + token)[:, None])
        peak, weight, total = attend_block(query, key, value, visible, log2_scale, peak, weight, total)

    result = total / weight[:, None]
    result_at = out + ((place + token)[:, None] * (KV_HEADS * GROUP) + head[:, None]) * DIM + lane[None, :]
    tl.store(result_at, result.to(out.dtype.element_ty), mask=inside)

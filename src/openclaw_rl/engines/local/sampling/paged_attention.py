"""Attention over a paged key-value cache as Triton kernels: of one new token per sequence, or of several prompts.

For sampling on CUDA, with the guarantees of `kernels.py`: launches and allocations follow from shapes alone, so
every function may be captured in a CUDA graph once a first call has compiled it.

The prompts of a step have different lengths, and each may have a beginning that the cache already holds. One launch
takes them all: the tokens are cut into tiles, and a tile belongs to one prompt.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm
from openclaw_rl.engines.local.model.kernels import chained, require_dense_last, wait_for_previous

#: Keys that a program reads at a time, and bytes of one of them: of longer ones it reads fewer, because cards for
#: desktops have 99 KiB of shared memory for a program.
KEYS_BLOCK, KEY_BYTES = 64, 512
LOG2_E = tl.constexpr(math.log2(math.e))
# The tensor cores multiply no fewer than 16 rows, however few query heads share a kv head.
MIN_DOT_ROWS = 16
# Three stages: page ids two blocks ahead, keys and values one. Deeper prefetch would take the shared
# memory with which several programs fit on a multiprocessor and hide each other's latency.
ATTEND_STAGES = 3
ATTEND_WARPS = 4
# Nearly four programs for each of an H200's 132 multiprocessors, as many as its registers hold at once: 64 sequences
# with eight kv heads are enough of them, and sequences that are not split need no second kernel.
TARGET_PROGRAMS = 512
MAX_SPLITS = 32
#: Rows of queries in a program: tokens times the query heads that share a kv head.
ROWS_BLOCK = 64
WARPS = 4


def paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    form: AttentionForm = PLAIN,
) -> None:
    """Attention of one query token per sequence, [batch, query heads, dim], over its cached tokens.

    The result goes into `out`, which has the size of `q`. Sequence b's token t lies in page
    `page_table[b, t // page_size]`, its own query token included in `lengths[b]`; nothing beyond the length is read.
    A sequence of length 0 yields zeros. Heads are grouped: query head h attends kv head
    `h // (query heads / kv heads)`. Of the `form` everything but its scale counts.
    """
    require_dense_last(q, page_table)
    _require_contiguous(k_pages, v_pages, lengths, out)
    batch, heads, dim = q.shape
    page_size, kv_heads = k_pages.shape[1], k_pages.shape[2]
    splits = _split_count(batch, kv_heads, page_table.shape[1] * page_size)
    group = heads // kv_heads
    shared: Any = {"DIM_BLOCK": triton.next_power_of_2(dim), "SINKS": form.sinks is not None, **chained(q)}
    options: Any = {"dtype": torch.float32, "device": q.device}
    # One split leaves its result; several leave parts of it.
    sums = out if splits == 1 else torch.empty((batch, heads, splits, dim), **options)
    peaks, weights = (None if splits == 1 else torch.empty((batch, heads, splits), **options) for _ in range(2))
    # Neighbouring programs read neighbouring heads of the same tokens, which lie side by side.
    _attend_split_kernel[(kv_heads, splits, batch)](
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        sums,
        peaks,
        weights,
        form.sinks,
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        scale * math.log2(math.e),
        KV_HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        PAGE_SIZE=page_size,
        WINDOW=form.window or 0,
        SOFTCAP=form.softcap or 0.0,
        GROUP_BLOCK=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        KEYS_BLOCK=_keys_block(triton.next_power_of_2(dim) * q.element_size()),
        WHOLE=splits == 1,
        num_warps=ATTEND_WARPS,
        num_stages=ATTEND_STAGES,
        **shared,
    )
    if splits > 1:
        _combine_splits_kernel[(batch * heads,)](
            sums, peaks, weights, form.sinks, out, HEADS=heads, DIM=dim, SPLITS=splits, **shared
        )


def _keys_block(key_bytes: int) -> int:
    return max(MIN_DOT_ROWS, min(KEYS_BLOCK, KEYS_BLOCK * KEY_BYTES // key_bytes))


def _split_count(batch: int, kv_heads: int, max_keys: int) -> int:
    """Into how many parts to cut every sequence: enough to fill the GPU, never finer than a block."""
    wanted = triton.cdiv(TARGET_PROGRAMS, max(batch * kv_heads, 1))
    useful = triton.cdiv(max_keys, KEYS_BLOCK)
    splits: int = triton.next_power_of_2(max(min(wanted, useful), 1))
    return min(splits, MAX_SPLITS)


def _require_contiguous(*tensors: Tensor) -> None:
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("pages, lengths and the result must be contiguous")


@triton.jit
def _split_bounds(length, split, splits, WINDOW: tl.constexpr, KEYS_BLOCK: tl.constexpr):
    """The keys [begin, end) of a split, counted in whole blocks of what the sequence attends to."""
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    span = tl.cdiv(tl.cdiv(length - first, splits), KEYS_BLOCK) * KEYS_BLOCK
    begin = first + split * span
    return begin, tl.minimum(begin + span, length)


@triton.jit
def attend_block(query, key, value, visible, log2_scale, peak, weight, total, SOFTCAP: tl.constexpr = 0.0):
    """Add one block of keys to a running softmax: the new peak, sum of weights and weighted sum of values.

    `visible` says which keys a row of queries attends to. The first block of a row has a visible key, so that the
    peak is finite.
    """
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * log2_scale
    if SOFTCAP > 0.0:
        # tanh, in base 2 as the scores are.
        cap: tl.constexpr = SOFTCAP * LOG2_E
        score = cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)
    score = tl.where(visible, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    fade = tl.exp2(peak - new_peak)
    share = tl.exp2(score - new_peak[:, None])
    weight = weight * fade + tl.sum(share, axis=1)
    total = total * fade[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
    return new_peak, weight, total


# Page tables of any width share one compiled kernel: a mixed batch must not wait for a compiler.
# fmt: off
@triton.jit(do_not_specialize=["table_stride"])
def _attend_split_kernel(
    q, k_pages, v_pages, page_table, lengths, sums, peaks, weights, sinks, q_batch_stride, q_head_stride, table_stride,
    log2_scale, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr, KEYS_BLOCK: tl.constexpr, WHOLE: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program attends all query heads of one kv head over one split of one sequence.

    Leaves, per query head, the peak score (base 2), the sum of weights relative to that peak and
    the weighted sum of values. A split past the end of its sequence leaves (-inf, 0, 0). If the split is the `WHOLE`
    sequence, it leaves the weighted mean instead.
    """
    # fmt: on
    wait_for_previous(CHAINED)
    kv_head = tl.program_id(0)
    split, splits = tl.program_id(1), tl.num_programs(1)
    sequence = tl.program_id(2).to(tl.int64)
    begin, end = _split_bounds(tl.load(lengths + sequence), split, splits, WINDOW, KEYS_BLOCK)

    member = tl.arange(0, GROUP_BLOCK)
    lane = tl.arange(0, DIM_BLOCK)
    in_group = member < GROUP
    in_dim = (lane < DIM)[None, :]
    head = kv_head * GROUP + member
    query_at = q + sequence * q_batch_stride + head[:, None] * q_head_stride + lane[None, :]
    query = tl.load(query_at, mask=in_group[:, None] & in_dim, other=0.0)

    peak = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.zeros([GROUP_BLOCK], tl.float32)
    total = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for block in range(begin, end, KEYS_BLOCK):
        position = block + tl.arange(0, KEYS_BLOCK)
        valid = position < end
        page_at = page_table + sequence * table_stride + position // PAGE_SIZE
        page = tl.load(page_at, mask=valid, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        offset = (slot * KV_HEADS + kv_head)[:, None] * DIM + lane[None, :]
        # Masked to zero, not only weighted by zero: an unwritten slot may hold NaN.
        readable = valid[:, None] & in_dim
        key = tl.load(k_pages + offset, mask=readable, other=0.0)
        value = tl.load(v_pages + offset, mask=readable, other=0.0)
        peak, weight, total = attend_block(query, key, value, valid[None, :], log2_scale, peak, weight, total, SOFTCAP)

    part = (sequence * (KV_HEADS * GROUP) + head) * splits + split
    if WHOLE:
        if SINKS:
            sink = tl.load(sinks + head, mask=in_group, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(peak, sink)
            weight = weight * tl.exp2(peak - top) + tl.exp2(sink - top)
            total = total * tl.exp2(peak - top)[:, None]
        total = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    else:
        tl.store(peaks + part, peak, mask=in_group)
        tl.store(weights + part, weight, mask=in_group)
    result = total.to(sums.dtype.element_ty)
    tl.store(sums + part[:, None] * DIM + lane[None, :], result, mask=in_group[:, None] & in_dim)


@triton.jit
def _combine_splits_kernel(
    sums,
    peaks,
    weights,
    sinks,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program merges the splits of one query head of one sequence."""
    wait_for_previous(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    part = row * SPLITS + tl.arange(0, SPLITS)
    lane = tl.arange(0, DIM_BLOCK)
    in_dim = lane < DIM
    peak = tl.load(peaks + part)
    weight = tl.load(weights + part)
    total = tl.load(sums + part[:, None] * DIM + lane[None, :], mask=in_dim[None, :], other=0.0)
    # An empty split has no peak; without the guard an empty sequence would subtract -inf from -inf.
    top = tl.max(peak, axis=0)
    if SINKS:
        sink = tl.load(sinks + row % HEADS).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    share = tl.where(weight > 0.0, tl.exp2(peak - top), 0.0)
    whole = tl.sum(share * weight, axis=0)
    if SINKS:
        whole += tl.exp2(sink - top)
    mixed = tl.sum(share[:, None] * total, axis=0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(out + row * DIM + lane, mixed.to(out.dtype.element_ty), mask=in_dim)


@dataclass(frozen=True, slots=True)
class PromptRun:
    """The tokens of a prompt that go through the model in this step."""

    place: int
    """Where they begin in the step's run of tokens."""
    start: int
    """The position of the first of them in its sequence."""
    count: int


def tile_tokens(group: int) -> int:
    """How many tokens of a prompt a tile has, if that many query heads share a kv head."""
    return ROWS_BLOCK // int(triton.next_power_of_2(group))


def tiles(prompts: Sequence[PromptRun], group: int) -> list[tuple[int, int, int, int]]:
    """(row of the page table, place in the run, position, number of tokens) of each tile, longest prompts first.

    `group` is the number of query heads that share a kv head.
    """
    tokens = tile_tokens(group)
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

    # A tile that only pads has no keys.
    result = total / tl.where(weight > 0.0, weight, 1.0)[:, None]
    result_at = out + ((place + token)[:, None] * (KV_HEADS * GROUP) + head[:, None]) * DIM + lane[None, :]
    tl.store(result_at, result.to(out.dtype.element_ty), mask=inside)

"""Adds adapters to a product's result, as two Triton kernels: the first factor, then the second one and the sum.

For more rows than `thin_products` takes, on CUDA, with the guarantees of `kernels.py`. The rows are cut into tiles, and
a tile has one adapter, so that a batch may mix adapters and reads only those that it uses. The number of tiles follows
from shapes; tiles that are not needed are empty.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model.kernels import chained, require_dense_last, wait_for_previous
from openclaw_rl.engines.local.model.policy_slots import Factors

#: The tensor cores multiply no fewer rows or columns.
MIN_DOT = 16
#: Rows of a tile, where each row is a sequence of its own, and where they are the tokens of prompts.
DECODE_ROWS, PROMPT_ROWS = 16, 64
#: With few rows the inputs are split among several programs, so that no program reads for long. The parts are summed
#: in a fixed order.
SPLIT_INPUTS, MAX_SPLITS = 512, 8
WIDTH_BLOCK, INPUTS_BLOCK, OUTPUTS_BLOCK = 32, 128, 128
WARPS = 4


class AdapterTiles(NamedTuple):
    """Which rows have which adapter."""

    table: Tensor
    """int32 [3, tiles]: the first row, the number of rows, and the slot, which counts from 1."""
    rows: int
    """How many rows a tile has at most."""


def cut_tiles(spans: Iterable[tuple[int, int, int]], rows: int) -> NDArray[np.int32]:
    """The tiles of spans (start, stop, slot), at most `rows` in each. Slot 0 has no adapter and no tiles."""
    cut = [
        (first, min(rows, stop - first), slot)
        for start, stop, slot in spans
        if slot
        for first in range(start, stop, rows)
    ]
    return np.ascontiguousarray(np.asarray(cut, np.int32).reshape(-1, 3).T)


def most_tiles(rows: int, slots: int) -> int:
    """How many tiles there can be of rows of one token each, if those of a slot are neighbours."""
    return min(rows, -(-rows // DECODE_ROWS) + slots)


def shrink(x: Tensor, factors: Factors, tiles: AdapterTiles) -> Tensor:
    """`x` [rows, in] times the first factors: float32 [splits, rows, modules * rank], to be summed over the splits.

    Rows without an adapter have no result.
    """
    require_dense_last(x, tiles.table)
    rows, inputs = x.shape
    width = factors.down.shape[1]
    # Tiles of prompts are programs enough.
    splits = min(triton.cdiv(inputs, SPLIT_INPUTS), MAX_SPLITS) if tiles.rows == DECODE_ROWS else 1
    block = min(max(triton.next_power_of_2(width), MIN_DOT), WIDTH_BLOCK)
    inner = torch.empty((splits, rows, width), dtype=torch.float32, device=x.device)
    _shrink_kernel[(triton.cdiv(width, block), splits, tiles.table.shape[1])](
        x,
        factors.down,
        tiles.table,
        inner,
        x.stride(0),
        tiles.table.stride(0),
        rows,
        INPUTS=inputs,
        WIDTH=width,
        SPAN=triton.cdiv(triton.cdiv(inputs, splits), INPUTS_BLOCK) * INPUTS_BLOCK,
        ROWS_BLOCK=tiles.rows,
        WIDTH_BLOCK=block,
        INPUTS_BLOCK=INPUTS_BLOCK,
        num_warps=WARPS,
        num_stages=3,
        **chained(x),
    )
    return inner


def expand_add(y: Tensor, inner: Tensor, factors: Factors, tiles: AdapterTiles) -> None:
    """Add to `y` [rows, out] what `shrink` left, rounded to its dtype, times the second factors."""
    require_dense_last(y, tiles.table)
    splits, rows, width = inner.shape
    first, second = factors.ends
    _expand_kernel[(triton.cdiv(y.shape[1], OUTPUTS_BLOCK), tiles.table.shape[1])](
        y,
        inner,
        factors.up,
        tiles.table,
        y.stride(0),
        tiles.table.stride(0),
        rows,
        SPLITS=splits,
        WIDTH=width,
        OUTPUTS=y.shape[1],
        FIRST_END=first,
        SECOND_END=second,
        RANK=factors.rank,
        RANK_BLOCK=max(triton.next_power_of_2(factors.rank), MIN_DOT),
        ROWS_BLOCK=tiles.rows,
        OUTPUTS_BLOCK=OUTPUTS_BLOCK,
        num_warps=WARPS,
        **chained(y),
    )


@triton.jit
def _tile(tile, stride):
    return tl.load(tile).to(tl.int64), tl.load(tile + stride), tl.load(tile + 2 * stride).to(tl.int64)


# Steps of any number of rows share one compiled kernel: a step must not wait for a compiler.
# fmt: off
@triton.jit(do_not_specialize=["tiles_stride", "rows"])
def _shrink_kernel(
    x, down, tiles, inner, x_stride, tiles_stride, rows, INPUTS: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr, ROWS_BLOCK: tl.constexpr, WIDTH_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program computes `WIDTH_BLOCK` columns for one tile, from one split of the inputs."""
    # fmt: on
    output = tl.program_id(0) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    split = tl.program_id(1)
    start, count, slot = _tile(tiles + tl.program_id(2), tiles_stride)
    row = tl.arange(0, ROWS_BLOCK)
    wait_for_previous(CHAINED)
    if count > 0:
        x_at = x + (start + row)[:, None] * x_stride
        down_at = down + ((slot - 1) * WIDTH + output)[:, None] * INPUTS
        begin = split * SPAN
        end = tl.minimum(begin + SPAN, INPUTS)
        total = tl.zeros([ROWS_BLOCK, WIDTH_BLOCK], tl.float32)
        for place in range(begin, end, INPUTS_BLOCK):
            column = place + tl.arange(0, INPUTS_BLOCK)[None, :]
            value = tl.load(x_at + column, mask=(row < count)[:, None] & (column < end), other=0.0)
            factor = tl.load(down_at + column, mask=(output < WIDTH)[:, None] & (column < end), other=0.0)
            total += tl.dot(value, tl.trans(factor), input_precision="ieee")
        at = inner + ((split * rows + start + row) * WIDTH)[:, None] + output[None, :]
        tl.store(at, total, mask=(row < count)[:, None] & (output < WIDTH)[None, :])


# fmt: off
@triton.jit
def _module_part(
    inner, up_at, row, count, output, rows, start, MODULE: tl.constexpr, BEGIN: tl.constexpr, END: tl.constexpr,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
):
    """[rows, outputs]: what one module's adapter adds; 0 in the columns of other modules."""
    # fmt: on
    rank = tl.arange(0, RANK_BLOCK)
    own = ((output >= BEGIN) & (output < END))[:, None] & (rank < RANK)[None, :]
    right = tl.load(up_at + output[:, None] * RANK + rank[None, :], mask=own, other=0.0)
    at = inner + ((start + row) * WIDTH + MODULE * RANK)[:, None] + rank[None, :]
    mask = (row < count)[:, None] & (rank < RANK)[None, :]
    left = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        left += tl.load(at + split * rows * WIDTH, mask=mask, other=0.0)
    return tl.dot(left.to(right.dtype), tl.trans(right), input_precision="ieee")


# fmt: off
@triton.jit(do_not_specialize=["tiles_stride", "rows"])
def _expand_kernel(
    y, inner, up, tiles, y_stride, tiles_stride, rows, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, ROWS_BLOCK: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program adds to `OUTPUTS_BLOCK` columns of one tile, which may be of several modules."""
    # fmt: on
    begin = tl.program_id(0) * OUTPUTS_BLOCK
    end = begin + OUTPUTS_BLOCK
    output = begin + tl.arange(0, OUTPUTS_BLOCK)
    start, count, slot = _tile(tiles + tl.program_id(1), tiles_stride)
    row = tl.arange(0, ROWS_BLOCK)
    wait_for_previous(CHAINED)
    if count > 0:
        up_at = up + (slot - 1) * (OUTPUTS * RANK)
        at = y + (start + row)[:, None] * y_stride + output[None, :]
        inside = (row < count)[:, None] & (output < OUTPUTS)[None, :]
        total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if begin < FIRST_END:
            total += _module_part(
                inner, up_at, row, count, output, rows, start, 0, 0, FIRST_END, SPLITS, WIDTH, RANK, RANK_BLOCK
            )
        if (begin < SECOND_END) & (end > FIRST_END):
            total += _module_part(
                inner, up_at, row, count, output, rows, start, 1, FIRST_END, SECOND_END, SPLITS, WIDTH, RANK, RANK_BLOCK
            )
        if end > SECOND_END:
            total += _module_part(
                inner, up_at, row, count, output, rows, start, 2, SECOND_END, OUTPUTS, SPLITS, WIDTH, RANK, RANK_BLOCK
            )
        tl.store(at, total.to(y.dtype.element_ty), mask=inside)

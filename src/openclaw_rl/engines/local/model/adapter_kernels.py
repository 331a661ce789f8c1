"""Adds adapters to a product's result, as two Triton kernels: the first factor, then the second one and the sum.

On CUDA, with the guarantees of `kernels.py`. The rows are cut into tiles, and a tile has one adapter or none, so that a
batch may mix adapters and reads only those that it uses. The number of tiles follows from shapes; tiles that are not
needed are empty. With one row, `thin_products` computes the first factor.
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
SPLIT_INPUTS, MAX_SPLITS = 1024, 8
WIDTH_BLOCK, INPUTS_BLOCK, OUTPUTS_BLOCK = 32, 128, 64
WARPS = 4


class AdapterTiles(NamedTuple):
    """Which rows have which adapter."""

    table: Tensor
    """int32 [3, tiles]: the first row, the number of rows, and the slot, which counts from 1; 0 for no adapter."""
    rows: int
    """How many rows a tile has at most."""


def cut_tiles(spans: Iterable[tuple[int, int, int]], rows: int) -> NDArray[np.int32]:
    """The tiles of spans (start, stop, slot), at most `rows` in each."""
    cut = [(first, min(rows, stop - first), slot) for start, stop, slot in spans for first in range(start, stop, rows)]
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


def expand(
    y: Tensor,
    inner: Tensor,
    factors: Factors,
    tiles: AdapterTiles,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """The result of a product with its adapters: `y` [rows, out] plus what `shrink` left, rounded, times the second
    factors. Then the residual stream is added, or the halves [gate, up] become silu(gate) * up.

    Without a gate, `y` is changed in place. Rows that no tile has keep what they hold.
    """
    require_dense_last(y)
    if residual is not None and not residual.is_contiguous():
        raise ValueError("the residual must be contiguous")
    splits, rows, width = inner.shape
    outputs = y.shape[1]
    first, second = factors.ends
    out = torch.empty((rows, first), dtype=y.dtype, device=y.device) if gated else y
    # A program's columns are of one module.
    parts = (first,) if gated else (first, second - first, outputs - second)
    _expand_kernel[(sum(triton.cdiv(part, OUTPUTS_BLOCK) for part in parts), tiles.table.shape[1])](
        y,
        inner,
        factors.up,
        tiles.table,
        residual,
        out,
        y.stride(0),
        out.stride(0),
        tiles.table.stride(0),
        rows,
        SPLITS=splits,
        WIDTH=width,
        OUTPUTS=outputs,
        FIRST_END=first,
        SECOND_END=second,
        RANK=factors.rank,
        RANK_BLOCK=max(triton.next_power_of_2(factors.rank), MIN_DOT),
        ROWS_BLOCK=tiles.rows,
        OUTPUTS_BLOCK=OUTPUTS_BLOCK,
        ADD=residual is not None,
        GATED=gated,
        num_warps=WARPS,
        **chained(y),
    )
    return out


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
    if slot > 0:
        x_at = x + (start + row)[:, None] * x_stride
        down_at = down + ((slot - 1) * WIDTH + output)[:, None] * INPUTS
        begin = split * SPAN
        end = tl.minimum(begin + SPAN, INPUTS)
        total = tl.zeros([ROWS_BLOCK, WIDTH_BLOCK], tl.float32)
        for place in range(0, SPAN, INPUTS_BLOCK):
            column = begin + place + tl.arange(0, INPUTS_BLOCK)[None, :]
            value = tl.load(x_at + column, mask=(row < count)[:, None] & (column < end), other=0.0)
            factor = tl.load(down_at + column, mask=(output < WIDTH)[:, None] & (column < end), other=0.0)
            total += tl.dot(value, tl.trans(factor), input_precision="ieee")
        at = inner + ((split * rows + start + row) * WIDTH)[:, None] + output[None, :]
        tl.store(at, total, mask=(row < count)[:, None] & (output < WIDTH)[None, :])


@triton.jit
def _second_factor(up, slot, column, end, OUTPUTS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """[columns, rank] of a slot's adapter; 0 without one."""
    rank = tl.arange(0, RANK_BLOCK)[None, :]
    at = up + ((slot - 1) * OUTPUTS + column)[:, None] * RANK + rank
    return tl.load(at, mask=(column < tl.where(slot > 0, end, 0))[:, None] & (rank < RANK), other=0.0)


# fmt: off
@triton.jit
def _adapted(
    y, inner, factor, row, inside, slot, column, module, y_stride, rows, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
):
    """[rows, columns] of one module's result with the adapter of a slot, rounded, in float32."""
    # fmt: on
    total = tl.load(y + row[:, None] * y_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rank = tl.arange(0, RANK_BLOCK)[None, :]
    at = inner + (row * WIDTH + module * RANK)[:, None] + rank
    mask = (row < tl.where(slot > 0, rows, 0))[:, None] & (rank < RANK)
    left = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        left += tl.load(at + split * rows * WIDTH, mask=mask, other=0.0)
    total += tl.dot(left.to(factor.dtype), tl.trans(factor), input_precision="ieee")
    return total.to(y.dtype.element_ty).to(tl.float32)


# fmt: off
@triton.jit(do_not_specialize=["tiles_stride", "rows"])
def _expand_kernel(
    y, inner, up, tiles, residual, out, y_stride, out_stride, tiles_stride, rows, SPLITS: tl.constexpr,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, ROWS_BLOCK: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr, ADD: tl.constexpr,
    GATED: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of one tile. With a gate, these are of the first module, and the
    columns of the second that belong to them are its too."""
    # fmt: on
    block = tl.program_id(0)
    SECOND: tl.constexpr = (FIRST_END + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    THIRD: tl.constexpr = SECOND + (SECOND_END - FIRST_END + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    module = (block >= SECOND).to(tl.int32) + (block >= THIRD).to(tl.int32)
    begin = tl.where(module == 0, 0, tl.where(module == 1, FIRST_END, SECOND_END))
    end = tl.where(module == 0, FIRST_END, tl.where(module == 1, SECOND_END, OUTPUTS))
    block -= tl.where(module == 0, 0, tl.where(module == 1, SECOND, THIRD))
    column = begin + block * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    start, count, slot = _tile(tiles + tl.program_id(1), tiles_stride)
    row = start + tl.arange(0, ROWS_BLOCK)
    inside = (row < start + count)[:, None] & (column < end)[None, :]
    # The factors are on their way while the product before ends.
    factor = _second_factor(up, slot, column, end, OUTPUTS, RANK, RANK_BLOCK)
    if GATED:
        right_factor = _second_factor(up, slot, FIRST_END + column, OUTPUTS, OUTPUTS, RANK, RANK_BLOCK)
    wait_for_previous(CHAINED)
    if count > 0:
        result = _adapted(
            y, inner, factor, row, inside, slot, column, module, y_stride, rows, SPLITS, WIDTH, RANK, RANK_BLOCK
        )
        if GATED:
            right = _adapted(
                y, inner, right_factor, row, inside, slot, FIRST_END + column, 1, y_stride, rows, SPLITS, WIDTH, RANK,
                RANK_BLOCK,
            )  # fmt: skip
            result = (result / (1.0 + tl.exp(-result))).to(y.dtype.element_ty).to(tl.float32) * right
        if ADD:
            at = residual + row[:, None] * OUTPUTS + column[None, :]
            result += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row[:, None] * out_stride + column[None, :], result.to(y.dtype.element_ty), mask=inside)

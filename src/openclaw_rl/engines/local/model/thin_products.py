"""Products of a weight matrix with very few rows, together with what surrounds them, as a Triton kernel.

With one or a few tokens a step is as fast as the weights can be read, and every other kernel only adds to that. So the
norm before a product, the gate after it and the sum with the residual stream belong to the kernel that reads the
weights. For sampling on CUDA, with the guarantees and the rounding of `kernels.py`.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.kernels import chained, require_dense_last, wait_for_previous
from openclaw_rl.engines.local.model.linear import Linear

#: (gain, eps) of a root-mean-square norm.
Norm = tuple[Tensor, float]

#: With more rows, a matrix product on the tensor cores is as fast.
MAX_ROWS = 4


class ProductTile(NamedTuple):
    """What one program computes: `outputs` columns of the result, `inputs` columns of the weights at a time."""

    outputs: int
    inputs: int
    warps: int


class RowAdapters(NamedTuple):
    """The adapters of a product: `down` [slots, width, in], `up` [slots, width, out], and the slot of each row.

    Slots count from 1. A row with slot 0 has no adapter.
    """

    down: Tensor
    up: Tensor
    slots: Tensor


#: Few outputs for each program, so that also small matrices keep every multiprocessor reading.
TILE = ProductTile(outputs=4, inputs=1024, warps=4)


def norm_product(x: Tensor, norm: Norm, linear: Linear, adapters: RowAdapters | None = None) -> Tensor:
    """Norm the rows of [rows, in], then multiply with the weight [out, in]."""
    return _launch(x, linear, adapters, len(linear.weight), norm=norm)


def norm_gated_product(x: Tensor, norm: Norm, linear: Linear, adapters: RowAdapters | None = None) -> Tensor:
    """Norm, multiply with a weight whose halves are [gate, up], and return silu(gate) * up."""
    return _launch(x, linear, adapters, len(linear.weight) // 2, norm=norm, gated=True)


def product_plus(x: Tensor, linear: Linear, residual: Tensor, adapters: RowAdapters | None = None) -> Tensor:
    """The product, rounded, plus the residual stream [rows, out]."""
    return _launch(x, linear, adapters, len(linear.weight), residual=residual)


def _launch(
    x: Tensor,
    linear: Linear,
    adapters: RowAdapters | None,
    width: int,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    weight, bias = linear.weight, linear.bias
    require_dense_last(x)
    if not weight.is_contiguous() or not (residual is None or residual.is_contiguous()):
        raise ValueError("the weight and the residual must be contiguous")
    rows, inputs = x.shape
    gain, eps = norm or (None, 0.0)
    inner = None if adapters is None else _low_rank(x, norm, adapters)
    up, slots = (None, None) if adapters is None else adapters[1:]
    low_rank = 0 if inner is None else inner.shape[1]
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    # More rows take more registers, so that a program has fewer columns at a time.
    rows_block = triton.next_power_of_2(rows)
    block = min(TILE.inputs // rows_block, triton.next_power_of_2(inputs))
    _product_kernel[(triton.cdiv(width, TILE.outputs),)](
        x,
        weight,
        bias,
        gain,
        inner,
        up,
        slots,
        residual,
        out,
        x.stride(0),
        eps,
        ROWS=rows,
        ROWS_BLOCK=rows_block,
        LOW_RANK=low_rank,
        LOW_RANK_BLOCK=triton.next_power_of_2(low_rank) if low_rank else 0,
        WIDTH=width,
        INPUTS=inputs,
        OUTPUTS_BLOCK=TILE.outputs,
        INPUTS_BLOCK=block,
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        ADD=residual is not None,
        num_warps=TILE.warps,
        **chained(x),
    )
    return out


def _low_rank(x: Tensor, norm: Norm | None, adapters: RowAdapters) -> Tensor:
    """Each row's (normed) input times the first factor of its adapter: [rows, width], zeros without an adapter."""
    rows, inputs = x.shape
    width = adapters.down.shape[1]
    gain, eps = norm or (None, 0.0)
    inner = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    _low_rank_kernel[(triton.cdiv(width, TILE.outputs), rows)](
        x,
        adapters.down,
        gain,
        adapters.slots,
        inner,
        x.stride(0),
        eps,
        WIDTH=width,
        INPUTS=inputs,
        OUTPUTS_BLOCK=TILE.outputs,
        INPUTS_BLOCK=min(TILE.inputs, triton.next_power_of_2(inputs)),
        NORM=norm is not None,
        num_warps=TILE.warps,
        **chained(x),
    )
    return inner


@triton.jit
def _input_block(x, gain, inverse, row, column, x_stride, ROWS: tl.constexpr, INPUTS: tl.constexpr, NORM: tl.constexpr):
    """The product's input in float32: [items, columns], or [1, columns] if there is only one row."""
    inside = column < INPUTS
    if ROWS == 1:
        value = tl.load(x + column, mask=inside, other=0.0)[None, :]
    else:
        mask = (row < ROWS)[:, None] & inside[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    if NORM:
        scale = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * inverse * scale[None, :]).to(x.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def _inverse_norm(
    x,
    row,
    lane,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
):
    """1 / the root of the mean square of each item's row: [items, 1], or [1, 1] if there is only one row."""
    power = _input_block(x, x, 0.0, row, lane, x_stride, ROWS, INPUTS, False)
    power *= power
    for start in range(INPUTS_BLOCK, INPUTS, INPUTS_BLOCK):
        value = _input_block(x, x, 0.0, row, start + lane, x_stride, ROWS, INPUTS, False)
        power += value * value
    return tl.rsqrt(tl.sum(power, axis=1) / INPUTS + eps)[:, None]


@triton.jit
def _weight_block(weight, output, column, WIDTH: tl.constexpr, INPUTS: tl.constexpr):
    """[items, columns] of the weight. Each element is read once in a step, so that it need not stay cached."""
    at = weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    inside = (output < WIDTH)[:, None] & (column < INPUTS)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _adapted(
    inner,
    up,
    slots,
    row,
    output,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOW_RANK: tl.constexpr,
    LOW_RANK_BLOCK: tl.constexpr,
):
    """[items]: `inner` times the second factor of the adapter of each item's row."""
    rank = tl.arange(0, LOW_RANK_BLOCK)[None, :]
    slot = tl.load(slots + row, mask=row < ROWS, other=0)
    active = ((slot > 0) & (output < WIDTH))[:, None] & (rank < LOW_RANK)
    left = tl.load(inner + row[:, None] * LOW_RANK + rank, mask=active, other=0.0).to(tl.float32)
    at = up + ((slot - 1).to(tl.int64)[:, None] * LOW_RANK + rank) * OUT + output[:, None]
    return tl.sum(left * tl.load(at, mask=active, other=0.0).to(tl.float32), axis=1)


@triton.jit
def _low_rank_kernel(
    x,
    down,
    gain,
    slots,
    inner,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of one row."""
    output = tl.program_id(0) * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    row = tl.program_id(1)
    lane = tl.arange(0, INPUTS_BLOCK)
    wait_for_previous(CHAINED)
    slot = tl.load(slots + row).to(tl.int64)
    total = tl.zeros([OUTPUTS_BLOCK, INPUTS_BLOCK], tl.float32)
    if slot > 0:
        own, factor = x + row * x_stride, down + (slot - 1) * (WIDTH * INPUTS)
        inverse = 0.0
        if NORM:
            inverse = _inverse_norm(own, output, lane, x_stride, eps, 1, INPUTS, INPUTS_BLOCK)
        for start in range(0, INPUTS, INPUTS_BLOCK):
            column = start + lane
            value = _input_block(own, gain, inverse, output, column, x_stride, 1, INPUTS, NORM)
            total += value * _weight_block(factor, output, column, WIDTH, INPUTS).to(tl.float32)
    result = tl.sum(total, axis=1).to(inner.dtype.element_ty)
    tl.store(inner + row * WIDTH + output, result, mask=output < WIDTH)


# fmt: off
@triton.jit
def _product_kernel(
    x, weight, bias, gain, inner, up, slots, residual, out, x_stride, eps, ROWS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, LOW_RANK: tl.constexpr, LOW_RANK_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of the result for every row. An item is one result."""
    # fmt: on
    dtype = out.dtype.element_ty
    item = tl.arange(0, ROWS_BLOCK * OUTPUTS_BLOCK)
    row, output = item // OUTPUTS_BLOCK, tl.program_id(0) * OUTPUTS_BLOCK + item % OUTPUTS_BLOCK
    lane = tl.arange(0, INPUTS_BLOCK)
    # The first weights are on their way while the kernel before ends and the norm is computed.
    right_weight = weight + tl.cast(WIDTH, tl.int64) * INPUTS
    first = _weight_block(weight, output, lane, WIDTH, INPUTS)
    if GATED:
        right_first = _weight_block(right_weight, output, lane, WIDTH, INPUTS)
    wait_for_previous(CHAINED)

    inverse = 0.0
    if NORM:
        inverse = _inverse_norm(x, row, lane, x_stride, eps, ROWS, INPUTS, INPUTS_BLOCK)
    value = _input_block(x, gain, inverse, row, lane, x_stride, ROWS, INPUTS, NORM)
    total = value * first.to(tl.float32)
    if GATED:
        right_total = value * right_first.to(tl.float32)
    for start in range(INPUTS_BLOCK, INPUTS, INPUTS_BLOCK):
        column = start + lane
        value = _input_block(x, gain, inverse, row, column, x_stride, ROWS, INPUTS, NORM)
        total += value * _weight_block(weight, output, column, WIDTH, INPUTS).to(tl.float32)
        if GATED:
            right_total += value * _weight_block(right_weight, output, column, WIDTH, INPUTS).to(tl.float32)

    OUT: tl.constexpr = WIDTH * 2 if GATED else WIDTH
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + output, mask=output < WIDTH, other=0.0).to(tl.float32)
    result = result.to(dtype).to(tl.float32)
    if LOW_RANK:
        result += _adapted(inner, up, slots, row, output, OUT, ROWS, WIDTH, LOW_RANK, LOW_RANK_BLOCK)
        result = result.to(dtype).to(tl.float32)
    if GATED:
        right = tl.sum(right_total, axis=1)
        if BIAS:
            right += tl.load(bias + WIDTH + output, mask=output < WIDTH, other=0.0).to(tl.float32)
        right = right.to(dtype).to(tl.float32)
        if LOW_RANK:
            right += _adapted(inner, up + WIDTH, slots, row, output, OUT, ROWS, WIDTH, LOW_RANK, LOW_RANK_BLOCK)
            right = right.to(dtype).to(tl.float32)
        result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * right
    at = row * WIDTH + output
    inside = (row < ROWS) & (output < WIDTH)
    if ADD:
        result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(dtype), mask=inside)

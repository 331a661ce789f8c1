"""Products of a weight matrix with very few rows, together with what surrounds them, as a Triton kernel.

With one or a few tokens a step is as fast as the weights can be read, and every other kernel only adds to that. So the
norm before a product, the gate after it and the sum with the residual stream belong to the kernel that reads the
weights. For sampling on CUDA, with the guarantees and the rounding of `kernels.py`.

So do adapters: the first programs of the kernel compute their first factor, while the others read the weights. These
need the result only at their end, and wait for it there. Programs start in their order, so that nobody waits for one
that has no place to run.
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
from openclaw_rl.engines.local.model.policy_slots import Factors

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
    """The adapters of a product."""

    factors: Factors
    slots: Tensor
    """Of each row, counted from 1; 0 for a row without an adapter."""
    arrivals: Tensor
    """int32 [1], of this product alone: 0 when the step begins."""


#: Few outputs for each program, so that also small matrices keep every multiprocessor reading.
TILE = ProductTile(outputs=4, inputs=1024, warps=4)
#: Of the programs that compute an adapter's first factor for one row. They need half as many turns as the others, which
#: wait for them.
LOW_RANK_TILE = ProductTile(outputs=2, inputs=2048, warps=TILE.warps)


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
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    # More rows take more registers, so that a program has fewer columns at a time.
    rows_block = triton.next_power_of_2(rows)
    columns = triton.next_power_of_2(inputs)
    tensors, sizes = _low_rank(x, adapters)
    _product_kernel[(sizes["LOW_RANK_PROGRAMS"] + triton.cdiv(width, TILE.outputs),)](
        x,
        weight,
        bias,
        gain,
        *tensors,
        residual,
        out,
        x.stride(0),
        eps,
        ROWS=rows,
        ROWS_BLOCK=rows_block,
        WIDTH=width,
        INPUTS=inputs,
        OUTPUTS_BLOCK=TILE.outputs,
        INPUTS_BLOCK=min(TILE.inputs // rows_block, columns),
        LOW_RANK_OUTPUTS=LOW_RANK_TILE.outputs,
        LOW_RANK_INPUTS=min(LOW_RANK_TILE.inputs, columns),
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        ADD=residual is not None,
        num_warps=TILE.warps,
        **sizes,
        **chained(x),
    )
    return out


def _low_rank(x: Tensor, adapters: RowAdapters | None) -> tuple[tuple[Tensor | None, ...], dict[str, int]]:
    """The kernel's arguments for adapters: (inner, down, up, slots, arrivals), and the sizes."""
    names = ("RANK", "RANK_BLOCK", "LOW_RANK", "FIRST_END", "SECOND_END", "LOW_RANK_PROGRAMS")
    if adapters is None:
        return (None,) * 5, dict.fromkeys(names, 0)
    factors, slots, arrivals = adapters
    rank, width = factors.rank, factors.down.shape[1]
    inner = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    programs = len(x) * triton.cdiv(width, LOW_RANK_TILE.outputs)
    sizes = (rank, triton.next_power_of_2(rank), width, *factors.ends, programs)
    return (inner, factors.down, factors.up, slots, arrivals), dict(zip(names, sizes, strict=True))


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


# fmt: off
@triton.jit
def _adapted(
    inner, factor, slot, row, column, ROWS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    LOW_RANK: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr,
):
    """[items]: `inner` of each item's row times its part of the second factor."""
    # fmt: on
    rank = tl.arange(0, RANK_BLOCK)[None, :]
    module = (column >= FIRST_END).to(tl.int32) + (column >= SECOND_END).to(tl.int32)
    active = (slot > 0)[:, None] & (rank < RANK)
    # Another multiprocessor has written it while this kernel ran: not from this one's own cache.
    at = inner + (row * LOW_RANK + module * RANK)[:, None] + rank
    left = tl.load(at, mask=active, other=0.0, cache_modifier=".cg").to(tl.float32)
    return tl.sum(left * factor.to(tl.float32), axis=1)


# fmt: off
@triton.jit
def _second_factor(
    up, slot, column, inside, OUT: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
):
    """[items, rank]: the part of each item's adapter; 0 without one."""
    # fmt: on
    rank = tl.arange(0, RANK_BLOCK)[None, :]
    at = up + ((slot - 1).to(tl.int64) * OUT + column)[:, None] * RANK + rank
    return tl.load(at, mask=((slot > 0) & inside)[:, None] & (rank < RANK), other=0.0)


# fmt: off
@triton.jit
def _first_factor(
    x, down, gain, inner, slots, arrivals, x_stride, eps, program, LOW_RANK: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr, NORM: tl.constexpr, CHAINED: tl.constexpr,
):
    """Compute `OUTPUTS_BLOCK` columns of one row's (normed) input times the first factor of its adapter."""
    # fmt: on
    PARTS: tl.constexpr = (LOW_RANK + OUTPUTS_BLOCK - 1) // OUTPUTS_BLOCK
    row = program // PARTS
    output = program % PARTS * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    lane = tl.arange(0, INPUTS_BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    wait_for_previous(CHAINED)
    if slot > 0:
        own, factor = x + row * x_stride, down + (slot - 1) * (LOW_RANK * INPUTS)
        inverse = 0.0
        if NORM:
            inverse = _inverse_norm(own, output, lane, x_stride, eps, 1, INPUTS, INPUTS_BLOCK)
        total = tl.zeros([OUTPUTS_BLOCK, INPUTS_BLOCK], tl.float32)
        for start in range(0, INPUTS, INPUTS_BLOCK):
            column = start + lane
            value = _input_block(own, gain, inverse, output, column, x_stride, 1, INPUTS, NORM)
            total += value * _weight_block(factor, output, column, LOW_RANK, INPUTS).to(tl.float32)
        result = tl.sum(total, axis=1).to(inner.dtype.element_ty)
        tl.store(inner + row * LOW_RANK + output, result, mask=output < LOW_RANK)
    # All threads have stored before one of them says so.
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="release")


# fmt: off
@triton.jit
def _product_kernel(
    x, weight, bias, gain, inner, down, up, slots, arrivals, residual, out, x_stride, eps, ROWS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr, LOW_RANK_OUTPUTS: tl.constexpr, LOW_RANK_INPUTS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    LOW_RANK: tl.constexpr, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr, LOW_RANK_PROGRAMS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of the result for every row, or a part of an adapter's inside."""
    # fmt: on
    if tl.program_id(0) < LOW_RANK_PROGRAMS:
        if LOW_RANK_PROGRAMS:
            _first_factor(
                x, down, gain, inner, slots, arrivals, x_stride, eps, tl.program_id(0), LOW_RANK, INPUTS,
                LOW_RANK_OUTPUTS, LOW_RANK_INPUTS, NORM, CHAINED,
            )
    else:
        _product(
            x, weight, bias, gain, inner, up, slots, arrivals, residual, out, x_stride, eps, ROWS, ROWS_BLOCK, WIDTH,
            INPUTS, OUTPUTS_BLOCK, INPUTS_BLOCK, NORM, GATED, BIAS, ADD, RANK, RANK_BLOCK, LOW_RANK, FIRST_END,
            SECOND_END, LOW_RANK_PROGRAMS, CHAINED,
        )


@triton.jit
def _rounded_sum(total, bias, out, column, inside, BIAS: tl.constexpr):
    """[items]: the product's result with its bias, rounded to the dtype of `out`."""
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return result.to(out.dtype.element_ty).to(tl.float32)


# fmt: off
@triton.jit
def _product(
    x, weight, bias, gain, inner, up, slots, arrivals, residual, out, x_stride, eps, ROWS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr,
    INPUTS_BLOCK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    RANK: tl.constexpr, RANK_BLOCK: tl.constexpr, LOW_RANK: tl.constexpr, FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr, LOW_RANK_PROGRAMS: tl.constexpr, CHAINED: tl.constexpr,
):
    """Compute `OUTPUTS_BLOCK` columns of the result for every row. An item is one result."""
    # fmt: on
    dtype = out.dtype.element_ty
    item = tl.arange(0, ROWS_BLOCK * OUTPUTS_BLOCK)
    row = item // OUTPUTS_BLOCK
    output = (tl.program_id(0) - LOW_RANK_PROGRAMS) * OUTPUTS_BLOCK + item % OUTPUTS_BLOCK
    lane = tl.arange(0, INPUTS_BLOCK)
    OUT: tl.constexpr = WIDTH * 2 if GATED else WIDTH
    # The first weights are on their way while the kernel before ends and the norm is computed.
    right_weight = weight + tl.cast(WIDTH, tl.int64) * INPUTS
    first = _weight_block(weight, output, lane, WIDTH, INPUTS)
    if GATED:
        right_first = _weight_block(right_weight, output, lane, WIDTH, INPUTS)
    if LOW_RANK:
        slot = tl.load(slots + row, mask=row < ROWS, other=0)
        factor = _second_factor(up, slot, output, output < WIDTH, OUT, RANK, RANK_BLOCK)
        if GATED:
            right_factor = _second_factor(up, slot, WIDTH + output, output < WIDTH, OUT, RANK, RANK_BLOCK)
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
    result = _rounded_sum(total, bias, out, output, output < WIDTH, BIAS)
    if LOW_RANK:
        while tl.atomic_add(arrivals, 0, sem="acquire") < LOW_RANK_PROGRAMS:
            pass
        result += _adapted(
            inner, factor, slot, row, output, ROWS, RANK, RANK_BLOCK, LOW_RANK, FIRST_END, SECOND_END
        )
        result = result.to(dtype).to(tl.float32)
    if GATED:
        right = _rounded_sum(right_total, bias, out, WIDTH + output, output < WIDTH, BIAS)
        if LOW_RANK:
            right += _adapted(
                inner, right_factor, slot, row, WIDTH + output, ROWS, RANK, RANK_BLOCK, LOW_RANK, FIRST_END, SECOND_END
            )
            right = right.to(dtype).to(tl.float32)
        result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * right
    at = row * WIDTH + output
    inside = (row < ROWS) & (output < WIDTH)
    if ADD:
        result += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(dtype), mask=inside)

"""Products of a weight matrix with one row, together with what surrounds them, as a Triton kernel.

With one token a step is as fast as the weights can be read, and every other kernel only adds to that. So the
norm before a product, the gate after it and the sum with the residual stream belong to the kernel that reads the
weights. For sampling on CUDA, with the guarantees and the rounding of `kernels.py`.

So does the first factor of adapters: some programs of the kernel compute it, while the others read the weights. No
program waits for another: the second factor, and then the gate or the residual stream, belong to the next kernel
(`adapter_kernels.expand`), which reads its factor while this one runs.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.adapter_kernels import AdapterTiles, expand
from openclaw_rl.engines.local.model.kernels import chained, require_dense_last, wait_for_previous
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.policy_slots import Factors

#: (gain, eps) of a root-mean-square norm.
Norm = tuple[Tensor, float]


class ProductTile(NamedTuple):
    """What one program computes: `outputs` columns of the result, `inputs` columns of the weights at a time."""

    outputs: int
    inputs: int
    warps: int


class RowAdapters(NamedTuple):
    """The adapters of a product."""

    factors: Factors
    slots: Tensor
    """[1]: of the row, counted from 1; 0 for none."""
    tiles: AdapterTiles


#: Few outputs for each program, so that also small matrices keep every multiprocessor reading.
TILE = ProductTile(outputs=4, inputs=1024, warps=4)
#: Of the programs that compute an adapter's first factor. They need half as many turns as the others.
LOW_RANK_TILE = ProductTile(outputs=2, inputs=2048, warps=TILE.warps)


def norm_product(x: Tensor, norm: Norm, linear: Linear, adapters: RowAdapters | None = None) -> Tensor:
    """Norm the row [1, in], then multiply with the weight [out, in]."""
    return _product(x, linear, adapters, norm=norm)


def norm_gated_product(x: Tensor, norm: Norm, linear: Linear, adapters: RowAdapters | None = None) -> Tensor:
    """Norm, multiply with a weight whose halves are [gate, up], and return silu(gate) * up."""
    return _product(x, linear, adapters, norm=norm, gated=True)


def product_plus(x: Tensor, linear: Linear, residual: Tensor, adapters: RowAdapters | None = None) -> Tensor:
    """The product, rounded, plus the residual stream [1, out]."""
    return _product(x, linear, adapters, residual=residual)


def _product(
    x: Tensor,
    linear: Linear,
    adapters: RowAdapters | None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    if adapters is None:
        return _launch(x, linear, norm, residual, gated)
    factors = adapters.factors
    inner = torch.empty((1, 1, factors.down.shape[1]), dtype=torch.float32, device=x.device)
    y = _launch(x, linear, norm, low_rank=(inner, factors.down, adapters.slots))
    return expand(y, inner, factors, adapters.tiles, residual, gated)


def _launch(
    x: Tensor,
    linear: Linear,
    norm: Norm | None,
    residual: Tensor | None = None,
    gated: bool = False,
    low_rank: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """`low_rank`: what adapters leave inside, their first factors, and the slot of the row."""
    weight, bias = linear.weight, linear.bias
    require_dense_last(x)
    if not weight.is_contiguous() or not (residual is None or residual.is_contiguous()):
        raise ValueError("the weight and the residual must be contiguous")
    if len(x) != 1:
        raise ValueError(f"one row is multiplied here, not {len(x)}")
    inputs = x.shape[1]
    width = len(weight) // 2 if gated else len(weight)
    gain, eps = norm or (None, 0.0)
    out = torch.empty((1, width), dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(inputs)
    inner, down, slots = low_rank or (None, None, None)
    inner_width = 0 if inner is None else inner.shape[2]
    parts = triton.cdiv(inner_width, LOW_RANK_TILE.outputs)
    _product_kernel[(parts + triton.cdiv(width, TILE.outputs),)](
        x,
        weight,
        bias,
        gain,
        inner,
        down,
        slots,
        residual,
        out,
        eps,
        WIDTH=width,
        INPUTS=inputs,
        OUTPUTS_BLOCK=TILE.outputs,
        INPUTS_BLOCK=min(TILE.inputs, columns),
        LOW_RANK=inner_width,
        LOW_RANK_PARTS=parts,
        LOW_RANK_OUTPUTS=LOW_RANK_TILE.outputs,
        LOW_RANK_INPUTS=min(LOW_RANK_TILE.inputs, columns),
        NORM=norm is not None,
        GATED=gated,
        BIAS=bias is not None,
        ADD=residual is not None,
        num_warps=TILE.warps,
        **chained(x),
    )
    return out


@triton.jit
def _input_block(x, gain, inverse, column, INPUTS: tl.constexpr, NORM: tl.constexpr):
    """The product's input in float32: [1, columns]."""
    inside = column < INPUTS
    value = tl.load(x + column, mask=inside, other=0.0)[None, :]
    if NORM:
        scale = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * inverse * scale[None, :]).to(x.dtype.element_ty)
    return value.to(tl.float32)


@triton.jit
def _inverse_norm(x, lane, eps, INPUTS: tl.constexpr, INPUTS_BLOCK: tl.constexpr):
    """1 / the root of the mean square of the row: [1, 1]."""
    power = _input_block(x, x, 0.0, lane, INPUTS, False)
    power *= power
    for start in range(INPUTS_BLOCK, INPUTS, INPUTS_BLOCK):
        value = _input_block(x, x, 0.0, start + lane, INPUTS, False)
        power += value * value
    return tl.rsqrt(tl.sum(power, axis=1) / INPUTS + eps)[:, None]


@triton.jit
def _weight_block(weight, output, column, WIDTH: tl.constexpr, INPUTS: tl.constexpr):
    """[outputs, columns] of the weight. Each element is read once in a step, so that it need not stay cached."""
    at = weight + output.to(tl.int64)[:, None] * INPUTS + column[None, :]
    inside = (output < WIDTH)[:, None] & (column < INPUTS)[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


# fmt: off
@triton.jit
def _product_kernel(
    x, weight, bias, gain, inner, down, slots, residual, out, eps, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr, LOW_RANK: tl.constexpr, LOW_RANK_PARTS: tl.constexpr,
    LOW_RANK_OUTPUTS: tl.constexpr, LOW_RANK_INPUTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of the result, or some columns of the adapter's first factor."""
    # fmt: on
    program = tl.program_id(0)
    if program < LOW_RANK_PARTS:
        if LOW_RANK_PARTS:
            slot = tl.load(slots).to(tl.int64)
            if slot > 0:
                _compute(
                    x, down + (slot - 1) * (LOW_RANK * INPUTS), bias, gain, residual, inner, program, eps, LOW_RANK,
                    INPUTS, LOW_RANK_OUTPUTS, LOW_RANK_INPUTS, NORM, False, False, False, CHAINED,
                )  # fmt: skip
    else:
        _compute(
            x, weight, bias, gain, residual, out, program - LOW_RANK_PARTS, eps, WIDTH, INPUTS, OUTPUTS_BLOCK,
            INPUTS_BLOCK, NORM, GATED, BIAS, ADD, CHAINED,
        )  # fmt: skip


@triton.jit
def _rounded_sum(total, bias, out, column, inside, BIAS: tl.constexpr):
    """[outputs]: the product's result with its bias, rounded to the dtype of `out`."""
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return result.to(out.dtype.element_ty).to(tl.float32)


# fmt: off
@triton.jit
def _compute(
    x, weight, bias, gain, residual, out, program, eps, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    OUTPUTS_BLOCK: tl.constexpr, INPUTS_BLOCK: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, CHAINED: tl.constexpr,
):
    """`OUTPUTS_BLOCK` columns of the result."""
    # fmt: on
    dtype = out.dtype.element_ty
    output = program * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    lane = tl.arange(0, INPUTS_BLOCK)
    # The first weights are on their way while the kernel before ends and the norm is computed.
    right_weight = weight + tl.cast(WIDTH, tl.int64) * INPUTS
    first = _weight_block(weight, output, lane, WIDTH, INPUTS)
    if GATED:
        right_first = _weight_block(right_weight, output, lane, WIDTH, INPUTS)
    wait_for_previous(CHAINED)
    inverse = 0.0
    if NORM:
        inverse = _inverse_norm(x, lane, eps, INPUTS, INPUTS_BLOCK)
    value = _input_block(x, gain, inverse, lane, INPUTS, NORM)
    total = value * first.to(tl.float32)
    if GATED:
        right_total = value * right_first.to(tl.float32)
    for start in range(INPUTS_BLOCK, INPUTS, INPUTS_BLOCK):
        column = start + lane
        value = _input_block(x, gain, inverse, column, INPUTS, NORM)
        total += value * _weight_block(weight, output, column, WIDTH, INPUTS).to(tl.float32)
        if GATED:
            right_total += value * _weight_block(right_weight, output, column, WIDTH, INPUTS).to(tl.float32)
    result = _rounded_sum(total, bias, out, output, output < WIDTH, BIAS)
    if GATED:
        right = _rounded_sum(right_total, bias, out, WIDTH + output, output < WIDTH, BIAS)
        result = (result / (1.0 + tl.exp(-result))).to(dtype).to(tl.float32) * right
    if ADD:
        result += tl.load(residual + output, mask=output < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + output, result.to(dtype), mask=output < WIDTH)

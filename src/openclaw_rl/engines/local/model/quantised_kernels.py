"""Products with weights of 4 or 8 bits (`codes`) on CUDA, as Triton kernels.

With a few rows a step is as fast as the weights can be read, so these are decoded where they are multiplied, and never
written. With many rows they are decoded into a buffer for the product of cuBLAS. Both round a weight to the precision
of the activations before they multiply, so that sampler and learner compute with the same numbers.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.codes import nf4
from openclaw_rl.engines.memory import GROUP

#: With more rows, decoding the weights once into a buffer costs less than the tensor cores wait for here.
MAX_ROWS = 64
#: The smallest side of a product on the tensor cores.
LEAST_SIDE = 16
#: Codes that one program decodes into a buffer.
DECODED = 1024


class DecodedTile(NamedTuple):
    """What one program computes: `outputs` columns of the result, `groups` groups of weights at a time."""

    outputs: int
    groups: int
    warps: int
    stages: int


#: Few outputs for each program, so that also small matrices keep every multiprocessor reading.
TILE = DecodedTile(outputs=16, groups=4, warps=4, stages=4)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., in] that codes and scales stand for."""
    narrow = codes.dtype == torch.uint8
    inputs = codes.shape[-1] * (2 if narrow else 1)
    weight = torch.empty(*codes.shape[:-1], inputs, dtype=dtype, device=codes.device)
    grid = (triton.cdiv(codes.numel(), DECODED),)
    _decode_kernel[grid](
        codes, scales, nf4(codes.device), weight, codes.numel(), inputs, NARROW=narrow, GROUP=GROUP, BLOCK=DECODED
    )
    return weight


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, tile: DecodedTile = TILE) -> Tensor:
    """[rows, in] times a weight [out, in], for at most `MAX_ROWS` rows."""
    rows, inputs = x.shape
    if not codes.is_contiguous() or x.stride(1) != 1:
        raise ValueError("the codes and the rows of the input must be contiguous")
    outputs = len(codes)
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _product_kernel[(triton.cdiv(outputs, tile.outputs),)](
        x,
        codes,
        scales,
        nf4(x.device),
        bias,
        result,
        rows,
        outputs,
        inputs,
        x.stride(0),
        NARROW=codes.dtype == torch.uint8,
        BIAS=bias is not None,
        ROWS_BLOCK=max(LEAST_SIDE, triton.next_power_of_2(rows)),
        OUTPUTS_BLOCK=tile.outputs,
        GROUPS=tile.groups,
        GROUP=GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return result


@triton.jit
def _decode_kernel(
    codes, scales, table, weight, count, inputs, NARROW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    code = tl.load(codes + at, mask=inside, other=0)
    if NARROW:
        scale = tl.load(scales + at // (GROUP // 2), mask=inside, other=0.0)
        pair = code.to(tl.int32)
        first = tl.load(table + (pair >> 4)) * scale
        second = tl.load(table + (pair & 15)) * scale
        both = tl.interleave(first, second)
        place = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        tl.store(weight + place, both.to(weight.dtype.element_ty), mask=place < 2 * count)
    else:
        value = code.to(tl.float32) * tl.load(scales + at // inputs, mask=inside, other=0.0)
        tl.store(weight + at, value.to(weight.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit
def _product_kernel(
    x, codes, scales, table, bias, result, rows, outputs, inputs, x_stride, NARROW: tl.constexpr, BIAS: tl.constexpr,
    ROWS_BLOCK: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of the result for every row."""
    # fmt: on
    dtype = x.dtype.element_ty
    row = tl.arange(0, ROWS_BLOCK)
    output = tl.program_id(0) * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    has_row = (row < rows)[:, None]
    has_output = (output < outputs)[:, None]
    start = output.to(tl.int64)[:, None]
    total = tl.zeros([ROWS_BLOCK, OUTPUTS_BLOCK], tl.float32)
    if NARROW:
        # The first of a byte's two weights belongs to an even input and the second to an odd one.
        HALF: tl.constexpr = GROUPS * GROUP // 2
        lane = tl.arange(0, HALF)
        group = tl.arange(0, GROUPS)
        for column in range(0, inputs // 2, HALF):
            byte = column + lane
            inside = byte < inputs // 2
            code = tl.load(codes + start * (inputs // 2) + byte[None, :], mask=has_output & inside[None, :], other=0)
            own = column // (GROUP // 2) + group
            scale = tl.load(
                scales + start * (inputs // GROUP) + own[None, :],
                mask=has_output & (own < inputs // GROUP)[None, :],
                other=0.0,
            )
            pair = code.to(tl.int32)
            first = _scaled(tl.load(table + (pair >> 4)), scale, OUTPUTS_BLOCK, GROUPS, GROUP // 2).to(dtype)
            second = _scaled(tl.load(table + (pair & 15)), scale, OUTPUTS_BLOCK, GROUPS, GROUP // 2).to(dtype)
            at = x + row[:, None] * x_stride + 2 * byte[None, :]
            mask = has_row & inside[None, :]
            total = tl.dot(tl.load(at, mask=mask, other=0.0), tl.trans(first), total, input_precision="ieee")
            total = tl.dot(tl.load(at + 1, mask=mask, other=0.0), tl.trans(second), total, input_precision="ieee")
    else:
        WIDTH: tl.constexpr = GROUPS * GROUP // 2
        lane = tl.arange(0, WIDTH)
        scale = tl.load(scales + output, mask=output < outputs, other=0.0)
        for column in range(0, inputs, WIDTH):
            place = column + lane
            inside = place < inputs
            code = tl.load(codes + start * inputs + place[None, :], mask=has_output & inside[None, :], other=0)
            weight = (code.to(tl.float32) * scale[:, None]).to(dtype)
            value = tl.load(x + row[:, None] * x_stride + place[None, :], mask=has_row & inside[None, :], other=0.0)
            total = tl.dot(value, tl.trans(weight), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    at = result + row[:, None] * outputs + output[None, :]
    tl.store(at, total.to(dtype), mask=has_row & (output < outputs)[None, :])


@triton.jit
def _scaled(values, scale, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """[outputs, groups * width] times the scale of each group."""
    return tl.reshape(tl.reshape(values, [OUTPUTS, GROUPS, WIDTH]) * scale[:, :, None], [OUTPUTS, GROUPS * WIDTH])

"""Products with weights of 4 or 8 bits (`codes`) on CUDA, as Triton kernels.

With a few rows a step is as fast as the weights can be read, so these are decoded where they are multiplied, and never
written. With many rows they are decoded into a buffer for the product of cuBLAS. Both round a weight to the precision
of the activations before they multiply, so that sampler and learner compute with the same numbers.
"""

# Triton infers the types of a kernel's arguments at launch; only `tl.constexpr` is annotated.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import struct
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openclaw_rl.engines.local.model.codes import NF4, nf4
from openclaw_rl.engines.local.model.kernels import chained, wait_for_previous
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
    programs: int
    """Inputs are split among programs until there are about so many: small matrices keep the device reading too."""


TILE = DecodedTile(outputs=64, groups=2, warps=4, stages=3, programs=640)
#: Results that one program sums.
SUMMED = 512
#: PTX: the number of NF4 whose code is the lane's place in its half of the warp.
OWN_NUMBER = tl.constexpr(
    "{ .reg .u32 lane; .reg .pred own; mov.u32 lane, %laneid; and.b32 lane, lane, 15; mov.b32 $0, $1;"
    + "".join(
        f" setp.eq.u32 own, lane, {code}; @own mov.b32 $0, 0f{struct.pack('>f', number).hex()};"
        for code, number in enumerate(NF4)
    )
    + " }"
)
#: PTX: the numbers of the upper and then of the lower halves of four bytes, from the lanes that keep them.
FOUR_PAIRS = tl.constexpr(
    "{ .reg .b32 code;"
    + "".join(
        f" shr.b32 code, $12, {shift}; shfl.sync.idx.b32 ${place}, ${8 + place % 4}, code, 0x101f, 0xffffffff;"
        for place, shift in enumerate((4, 12, 20, 28, 0, 8, 16, 24))
    )
    + " }"
)


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
    """[rows, in] times a weight [out, in], for at most `MAX_ROWS` rows. The sums have a fixed order."""
    rows, inputs = x.shape
    narrow = codes.dtype == torch.uint8
    if not codes.is_contiguous() or x.stride(1) != 1 or (narrow and (x.stride(0) % 2 or int(x.storage_offset()) % 2)):
        raise ValueError("the codes and the rows of the input must be contiguous, and begin at a pair of inputs")
    outputs = len(codes)
    columns = triton.cdiv(outputs, tile.outputs)
    step = tile.groups * GROUP
    span = step * triton.cdiv(triton.cdiv(inputs, step), max(1, tile.programs // columns))
    splits = triton.cdiv(inputs, span)
    result = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    parts = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device) if splits > 1 else result
    _product_kernel[(columns, splits)](
        x,
        codes,
        scales,
        nf4(x.device),
        bias,
        parts,
        rows,
        outputs,
        inputs,
        x.stride(0),
        codes.stride(0),
        SPAN=span,
        NARROW=narrow,
        BIAS=bias is not None and splits == 1,
        ROWS_BLOCK=max(LEAST_SIDE, triton.next_power_of_2(rows)),
        OUTPUTS_BLOCK=tile.outputs,
        GROUPS=tile.groups,
        GROUP=GROUP,
        SHUFFLE=x.is_cuda and torch.version.hip is None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **chained(x),
    )
    if splits > 1:
        _sum_kernel[(triton.cdiv(rows * outputs, SUMMED),)](
            parts,
            bias,
            result,
            rows * outputs,
            outputs,
            SPLITS=splits,
            BIAS=bias is not None,
            BLOCK=SUMMED,
            num_warps=4,
            **chained(x),
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
@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x, codes, scales, table, bias, result, rows, outputs, inputs, x_stride, codes_stride, SPAN: tl.constexpr,
    NARROW: tl.constexpr, BIAS: tl.constexpr, ROWS_BLOCK: tl.constexpr, OUTPUTS_BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, SHUFFLE: tl.constexpr, CHAINED: tl.constexpr,
):
    """One program computes `OUTPUTS_BLOCK` columns of the result for every row, from `SPAN` of the inputs.

    All between a load and the tensor cores works on single elements, so that Triton copies codes and rows to where the
    tensor cores want them, and decodes there.
    """
    # fmt: on
    dtype = x.dtype.element_ty
    row = tl.arange(0, ROWS_BLOCK)
    output = tl.program_id(0) * OUTPUTS_BLOCK + tl.arange(0, OUTPUTS_BLOCK)
    has_row = (row < rows)[:, None]
    has_output = output < outputs
    begin = tl.program_id(1) * SPAN
    start = output.to(tl.int64)
    total = tl.zeros([ROWS_BLOCK, OUTPUTS_BLOCK], tl.float32)
    wait_for_previous(CHAINED)
    if NARROW:
        # The first of a byte's two weights belongs to an even input and the second to an odd one.
        HALF: tl.constexpr = GROUP // 2
        WORD: tl.constexpr = tl.uint32 if dtype.primitive_bitwidth == 16 else tl.uint64
        pairs = x.to(tl.pointer_type(WORD), bitcast=True) + row[:, None] * (x_stride // 2)
        own = _own_number(table, output, SHUFFLE)
        for column in range(0, SPAN, GROUPS * GROUP):
            for group in tl.static_range(GROUPS):
                place = (begin + column) // GROUP + group
                # Of one element: a scalar as a mask is an error in the interpreter of Triton 3.9.
                inside = tl.full([1], place, tl.int32) < inputs // GROUP
                byte = place * HALF + tl.arange(0, HALF)
                at = codes + start[None, :] * codes_stride + byte[:, None]
                code = tl.load(at, mask=has_output[None, :] & inside, other=0)
                scale = tl.load(scales + start * (inputs // GROUP) + place, mask=has_output & inside, other=0.0)
                pair = tl.load(pairs + byte[None, :], mask=has_row & inside, other=0)
                first, second = _numbers(own, table, code, SHUFFLE)
                first = (first * scale[None, :]).to(dtype)
                second = (second * scale[None, :]).to(dtype)
                total = tl.dot(_lower(pair, dtype), first, total, input_precision="ieee")
                total = tl.dot(_lower(pair >> dtype.primitive_bitwidth, dtype), second, total, input_precision="ieee")
    else:
        scale = tl.load(scales + output, mask=has_output, other=0.0)
        for column in range(0, SPAN, GROUPS * GROUP):
            place = begin + column + tl.arange(0, GROUPS * GROUP)
            inside = place < inputs
            at = codes + start[None, :] * codes_stride + place[:, None]
            code = tl.load(at, mask=has_output[None, :] & inside[:, None], other=0)
            weight = (code.to(tl.float32) * scale[None, :]).to(dtype)
            value = tl.load(x + row[:, None] * x_stride + place[None, :], mask=has_row & inside[None, :], other=0.0)
            total = tl.dot(value, weight, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + output, mask=has_output, other=0.0).to(tl.float32)[None, :]
    at = result + (tl.program_id(1) * rows + row[:, None]) * outputs + output[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=has_row & has_output[None, :])


@triton.jit
def _own_number(table, output, SHUFFLE: tl.constexpr):
    """[1, outputs]: the number of NF4 that this lane of its warp keeps for the others, whatever was loaded."""
    own = tl.load(table + output % 16)[None, :]
    if SHUFFLE:
        own = tl.inline_asm_elementwise(OWN_NUMBER, "=f,f", [own], dtype=tl.float32, is_pure=True, pack=1)
    return own


@triton.jit
def _numbers(own, table, code, SHUFFLE: tl.constexpr):
    """What the upper and the lower half of each byte stand for. A lane asks its neighbours, not the memory."""
    if SHUFFLE:
        first, second = tl.inline_asm_elementwise(
            FOUR_PAIRS, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,r", [own, code],
            dtype=(tl.float32, tl.float32), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        pair = code.to(tl.int32)
        first, second = tl.load(table + (pair >> 4)), tl.load(table + (pair & 15))
    return first, second


@triton.jit
def _lower(pair, dtype: tl.constexpr):
    """The first number of each pair."""
    BITS: tl.constexpr = tl.uint16 if dtype.primitive_bitwidth == 16 else tl.uint32
    return pair.to(BITS).to(dtype, bitcast=True)


@triton.jit
def _sum_kernel(
    parts, bias, result, count, outputs, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The parts of each result one after another, and then the bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wait_for_previous(CHAINED)
    total = tl.load(parts + at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * count + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + at, total.to(result.dtype.element_ty), mask=inside)

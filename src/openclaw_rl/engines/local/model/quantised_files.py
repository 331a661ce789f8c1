"""Weights of folders that are quantised already, as numbers.

What bitsandbytes stored in NF4 (in blocks of 64) or int8 is stored in the same codes again (`codes`), so that nothing
is lost. The others are decoded when they are loaded, exactly up to the rounding to the precision of the model: no
library computes gradients through all of them on every device.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.codes import MOST
from openclaw_rl.engines.memory import BITS, GROUP

#: The ends of names of tensors that only help to decode others.
PARTS = (
    *(".qzeros", ".scales", ".g_idx", ".SCB", ".weight_format", ".weight_scale_inv", ".weight_scale"),
    *(".input_scale", ".activation_scale", "_scales"),
)
QUANT_STATE = ".quant_state.bitsandbytes__"
#: Numbers of 4 bits with a sign, two bits of exponent and one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Where AWQ puts the columns 0 to 7 of eight in an int32, counted in units of four bits.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
WORD = 32


class Stored(Protocol):
    """The tensors of a folder as they are stored."""

    def __contains__(self, name: str) -> bool: ...
    def raw(self, name: str) -> Tensor: ...


def plain_name(name: str) -> str | None:
    """The name of the weight that a stored tensor holds; None for one that only helps to decode it."""
    if name.endswith(PARTS) or ".weight." in name:
        return None
    return name.removesuffix("_blocks").replace(".qweight", ".weight")


def stored_bits(name: str, stored: Stored) -> int:
    """The bits in which this program keeps a weight as it is stored; 0 if it is decoded."""
    if f"{name}{QUANT_STATE}nf4" in stored:
        return BITS["4bit"] if quant_state(stored.raw(f"{name}{QUANT_STATE}nf4"))["blocksize"] == GROUP else 0
    return BITS["8bit"] if f"{module_of(name)}.SCB" in stored else 0


def decoded(name: str, stored: Stored, settings: Mapping[str, Any]) -> Tensor:
    """The weight of this name. `settings`: the folder's quantization_config."""
    module = module_of(name)
    if f"{module}.qweight" in stored:
        decode = decode_awq if settings.get("quant_method") == "awq" else decode_gptq
        return decode(lambda part: stored.raw(f"{module}.{part}"), f"{module}.g_idx" in stored, settings)
    if f"{name}_blocks" in stored:
        return decode_mxfp4(stored.raw(f"{name}_blocks"), stored.raw(f"{name}_scales"))
    tensor = stored.raw(name)
    if f"{module}.SCB" in stored:
        return tensor.float() * (stored.raw(f"{module}.SCB").float() / MOST)[:, None]
    for kind in ("nf4", "fp4"):
        if f"{name}{QUANT_STATE}{kind}" in stored:
            return decode_bitsandbytes(tensor, lambda part: stored.raw(f"{name}.{part}"), kind)
    for part in ("weight_scale_inv", "weight_scale"):
        if f"{module}.{part}" in stored and tensor.dtype == torch.float8_e4m3fn:
            scales = stored.raw(f"{module}.{part}").float()
            return tensor.float() * spread(scales, tensor.shape, block_of(settings))
    return tensor


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def decode_bitsandbytes(codes: Tensor, part: Callable[[str], Tensor], kind: str) -> Tensor:
    """Two codes in each byte, and a scale for each block, which may be quantised itself."""
    state = quant_state(part(f"quant_state.bitsandbytes__{kind}"))
    scales = part("absmax")
    if "nested_blocksize" in state:
        inner = part("nested_quant_map").float()[scales.int()].view(-1)
        outer = part("nested_absmax").float().repeat_interleave(state["nested_blocksize"])[: len(inner)]
        scales = inner * outer + state["nested_offset"]
    flat = codes.flatten()
    values = part("quant_map").float()[torch.stack((flat >> 4, flat & 15), 1).int()].view(-1)
    blocks = values.view(-1, state["blocksize"]) * scales.float()[:, None]
    return blocks.view(state["shape"])


def quant_state(stored: Tensor) -> dict[str, Any]:
    """What bitsandbytes notes beside a weight of 4 bits."""
    state: dict[str, Any] = json.loads(bytes(stored.tolist()))
    return state


def decode_gptq(part: Callable[[str], Tensor], has_order: bool, settings: Mapping[str, Any]) -> Tensor:
    """[in / codes in a word, out], with zeros [groups, out / codes in a word] and scales [groups, out]."""
    bits = int(settings.get("bits", 4))
    scales = part("scales").float()
    codes = unpacked(part("qweight").t(), bits, range(WORD // bits)).t()
    zeros = unpacked(part("qzeros"), bits, range(WORD // bits))
    # The first version of the format stores zeros that are smaller by one.
    if settings.get("checkpoint_format") != "gptq_v2":
        zeros = zeros + 1 & (1 << bits) - 1
    groups = part("g_idx").long() if has_order else torch.arange(len(codes)) // (len(codes) // len(scales))
    return ((codes - zeros[groups]) * scales[groups]).t()


def decode_awq(part: Callable[[str], Tensor], _has_order: bool, settings: Mapping[str, Any]) -> Tensor:
    """[in, out / codes in a word], with zeros [groups, out / codes in a word] and scales [groups, out]."""
    scales = part("scales").float()
    codes = unpacked(part("qweight"), 4, AWQ_PLACES)
    zeros = unpacked(part("qzeros"), 4, AWQ_PLACES)
    size = len(codes) // len(scales)
    return ((codes - zeros.repeat_interleave(size, 0)) * scales.repeat_interleave(size, 0)).t()


def unpacked(words: Tensor, bits: int, places: Any) -> Tensor:
    """[rows, words] → [rows, words * codes in a word]"""
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def decode_mxfp4(blocks: Tensor, exponents: Tensor) -> Tensor:
    """[experts, out, groups, 16 bytes] with an exponent for each group → [experts, in, out], as gpt-oss computes."""
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)
    values = torch.tensor(FP4)[pairs.int()].flatten(-2)
    return torch.ldexp(values, exponents.int()[..., None] - 127).flatten(-2).transpose(1, 2)


def block_of(settings: Mapping[str, Any]) -> Sequence[int] | None:
    """The rows and columns that share a scale of FP8; None if the folder names none."""
    groups = (settings.get("config_groups") or {}).values()
    named = (group["weights"].get("block_structure") for group in groups if group.get("weights"))
    return settings.get("weight_block_size") or next(filter(None, named), None)


def spread(scales: Tensor, shape: torch.Size, block: Sequence[int] | None) -> Tensor:
    """Scales of blocks, of rows or of the whole weight, one for each number of it."""
    if scales.numel() == 1:
        return scales.view(1, 1)
    wide = scales.view(len(scales), -1)
    for side in (0, 1):
        size = -(-shape[side] // wide.shape[side])
        # The last block of a side may be smaller.
        if block and -(-shape[side] // block[side]) == wide.shape[side]:
            size = block[side]
        wide = wide.repeat_interleave(size, side).narrow(side, 0, shape[side])
    return wide

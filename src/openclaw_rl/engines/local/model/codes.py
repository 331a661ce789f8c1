"""Weights as codes of 4 or 8 bits with scales.

- 8 bits: a whole number for each weight, and a scale for each output.
- 4 bits: one of the 16 values of NF4 for each weight (QLoRA, appendix E), and a scale for each 64 weights.

Both are what bitsandbytes stores, so that its folders keep their numbers.
"""

import functools

import torch
from torch import Tensor

from openclaw_rl.engines.memory import BITS, GROUP

#: The numbers of NF4: quantiles of the normal distribution, with -1, 0 and 1 among them.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
MOST = 127
#: Weights that are encoded at a time.
ENCODED = 1 << 24


def can_be_encoded(weight: Tensor, bits: int) -> bool:
    return bits == BITS["8bit"] or (bits == BITS["4bit"] and weight.shape[-1] % GROUP == 0)


def encode(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes and scales of a weight [..., in]."""
    rows = weight.flatten(0, -2)
    parts = [encode_rows(some.float(), bits) for some in torch.split(rows, max(1, ENCODED // rows.shape[1]))]
    codes, scales = (torch.cat(same).view(*weight.shape[:-1], -1) for same in zip(*parts, strict=True))
    return codes, scales


def encode_rows(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    if bits == BITS["8bit"]:
        scales = rows.abs().amax(1, keepdim=True) / MOST
        return (rows / at_least_tiny(scales)).round_().to(torch.int8), scales
    groups = rows.view(len(rows), -1, GROUP)
    scales = groups.abs().amax(2)
    table = nf4(rows.device)
    nearest = torch.bucketize(groups / at_least_tiny(scales)[..., None], (table[1:] + table[:-1]) / 2, out_int32=True)
    first, second = nearest.to(torch.uint8).view(len(rows), -1, 2).unbind(-1)
    return first << 4 | second, scales


def at_least_tiny(scales: Tensor) -> Tensor:
    return scales.clamp(min=torch.finfo(torch.float32).tiny)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., in] that codes and scales stand for, computed by PyTorch on any device."""
    if codes.dtype == torch.int8:
        return codes.float().mul_(scales).to(dtype)
    # One look-up finds both numbers of a byte.
    pairs = nf4_pairs(codes.device).index_select(0, codes.flatten().int()).view(torch.float32)
    return pairs.view(*scales.shape, GROUP).mul_(scales[..., None]).flatten(-2).to(dtype)


@functools.cache
@torch.inference_mode(False)
def nf4(device: torch.device) -> Tensor:
    return torch.tensor(NF4, device=device)


@functools.cache
@torch.inference_mode(False)
def nf4_pairs(device: torch.device) -> Tensor:
    """For each byte the two numbers that it stands for, in the eight bytes of an int64."""
    byte = torch.arange(256)
    table = nf4(torch.device("cpu"))
    return torch.stack((table[byte >> 4], table[byte & 15]), 1).view(torch.int64).flatten().to(device)

"""A second copy of the weights, in the blocks in which a CPU multiplies them, for the sampler's products.

A product of a few rows takes most of its time to read the weights and to arrange them in blocks, again at every call.
There are two ways to keep them arranged:

- oneDNN keeps them in float32. The numbers are the same. A single row is computed from the weights as they are, which
  is faster.
- FBGEMM, on x86, keeps them in float16: half as much to read. Weights are rounded to 11 bits; inputs, sums and results
  are float32.

Where weights are in bfloat16, because the processor multiplies several rows fastest so, oneDNN keeps them in blocks of
bfloat16, and FBGEMM has the same numbers in float16 for single rows, which it multiplies faster.
"""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.host import usable_memory
from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Layer
from openclaw_rl.engines.local.model.kept_measurements import machine, read, write
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.placement import name_of

#: The rows for which oneDNN's blocks are laid out. Other numbers of rows work too.
ROWS = 8
NORMS = ("input_norm", "post_norm", "q_norm", "k_norm")
#: The rows with which the ways are compared: one answer, and several at once.
COMPARED_ROWS = (1, ROWS)
#: A copy is made only if its products of one row or of several, and both taken together, are so many times as fast.
LEAST_SPEEDUP = 1.15
#: The largest share of the free memory that the copy may take.
MAX_MEMORY_SHARE = 1 / 8
#: The smallest model that auto rounds to float16: a smaller one has little to gain.
LEAST_HALF_WEIGHTS = 16 << 20
#: The largest error of a weight in float16, as a share of the largest weight for the same output. Weights near the
#: smallest numbers of float16, or above its largest, have larger ones.
MAX_ROUNDING = 1 / 1024
#: Rows of a weight that are rounded at a time, for a look at the error.
ROUNDED_ROWS = 4096
MEASUREMENTS = 15
#: In the cache folder: what the ways have gained on this machine.
FILE = "cpu-packing.json"


@dataclass(slots=True)
class PackedLinear(Linear):
    """A projection with a copy of its weight in float32."""

    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


@dataclass(slots=True)
class HalfLinear(Linear):
    """A projection with a copy of its weight in float16, in an object of FBGEMM that holds the bias too."""

    packed: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)
        return y


@dataclass(slots=True)
class NarrowLinear(Linear):
    """A projection in bfloat16 with two copies: one in float16 for single rows, and one in blocks for several."""

    single: Any = None
    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            y: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.single)
        else:
            narrow = x.to(self.weight.dtype)
            y = torch.ops.mkldnn._linear_pointwise(narrow, self.packed, self.bias, "none", [], "").to(x.dtype)
        return y


@dataclass(frozen=True, slots=True)
class Way:
    """A way to pack weights."""

    dtype: torch.dtype
    pack: Callable[[Linear], Linear]
    holds: Callable[[Tensor], bool]
    """Whether a weight can be packed so."""
    max_error: float
    """Results may differ by this share of the largest one."""
    copies: int = 1
    """How many copies of that precision's size it makes."""


@dataclass(slots=True)
class PackedDecoder(Decoder):
    """A decoder whose projections and head are packed."""

    packed_head: Linear | None = None
    way: "Way | None" = None

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.packed_head is not None
        return self.packed_head(hidden)


@torch.inference_mode()
def packed(decoder: Decoder, ways: Sequence[Way], is_wanted: Callable[[], bool] = lambda: True) -> Decoder:
    """The decoder with a copy of its weights, packed in the first of the ways that can; without one, as it is.

    It takes seconds for every hundred million weights, mostly on one core and without the interpreter's lock. It is
    given up when it is no longer wanted.
    """
    way = next((way for way in ways if all(is_wanted() and way.holds(weight) for weight in weights_of(decoder))), None)
    if way is None:
        return decoder
    layers = []
    for layer in decoder.layers:
        if not is_wanted():
            return decoder
        layers.append(pack_layer(layer, way))
    shared = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    head = way.pack(Linear(decoder.head))
    return PackedDecoder(**{**shared, "layers": layers, "norm": decoder.norm.float()}, packed_head=head, way=way)


@torch.inference_mode()
def ways_for(decoder: Decoder, choice: str, cache: Path | None = None) -> list[Way]:
    """The ways to pack that a choice allows and that are possible here, the best first.

    `choice` is on (in float32), half (in float16), off, or auto: those that make this machine faster and fit into the
    free memory. That is measured; the result is kept in the cache folder. None is possible where PyTorch has no such
    products: for other devices and precisions, and in builds without oneDNN or FBGEMM.
    """
    if decoder.embed.device.type != "cpu" or decoder.layers[0].quantised:
        return []
    ways = []
    if decoder.embed.dtype == torch.bfloat16:
        if choice in ("on", "auto") and has_packed_products() and has_half_products():
            ways.append(NARROW)
    elif decoder.embed.dtype == torch.float32:
        if choice in ("on", "auto") and has_packed_products():
            ways.append(BLOCKS)
        if can_be_half(decoder, choice):
            ways.append(HALF)
    if choice != "auto":
        return ways
    return by_speed(decoder.layers[0], [way for way in ways if has_room(decoder, way)], cache)


def can_be_half(decoder: Decoder, choice: str) -> bool:
    large = sum(map(torch.numel, weights_of(decoder))) >= LEAST_HALF_WEIGHTS
    return (choice == "half" or (choice == "auto" and large)) and has_half_products()


def has_packed_products() -> bool:
    """Whether this PyTorch has products with weights in the blocks of oneDNN."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # They are not part of PyTorch's public interface, so another version may not have them.
    return has_onednn and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def has_half_products() -> bool:
    """Whether this machine and this PyTorch have those of FBGEMM."""
    names = ("linear_prepack_fp16", "linear_dynamic_fp16")
    # PyTorch for Arm names this engine too, but its products end the process where the processor has no SVE.
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return (
        is_x86
        and torch.backends.quantized.engine in ("x86", "fbgemm")
        and all(hasattr(torch.ops.quantized, name) for name in names)
    )


def fits_float16(weight: Tensor) -> bool:
    """Whether every output's weights can be rounded to float16."""
    return all(map(rows_fit_float16, torch.split(weight, ROUNDED_ROWS)))


def rows_fit_float16(rows: Tensor) -> bool:
    largest = rows.abs().amax(1)
    error = (rows.half().float() - rows).abs_().amax(1)
    return bool((error <= MAX_ROUNDING * largest).all() and largest.max() <= torch.finfo(torch.float16).max)


def has_room(decoder: Decoder, way: Way) -> bool:
    """Whether there is the memory for a copy."""
    weights = sum(weight.numel() for weight in weights_of(decoder))
    return weights * way.copies * way.dtype.itemsize <= usable_memory() * MAX_MEMORY_SHARE


def packed_bytes(decoder: LanguageModel) -> int:
    """The memory of the packed copy; 0 if there is none."""
    if not isinstance(decoder, PackedDecoder) or decoder.way is None:
        return 0
    return sum(weight.numel() for weight in weights_of(decoder)) * decoder.way.copies * decoder.way.dtype.itemsize


def weights_of(decoder: Decoder) -> list[Tensor]:
    """The weights of all products."""
    return [linear.weight for layer in decoder.layers for linear in linears_of(layer)] + [decoder.head]


def by_speed(layer: Layer, ways: Sequence[Way], cache: Path | None) -> list[Way]:
    """Those ways that give the right results here and gain enough, the fastest first."""
    parts = [linear.weight for linear in linears_of(layer)]
    # FBGEMM changes weights that float16 has no room for, in place, so these are looked for first.
    possible = {name_of(way.dtype): way for way in ways if all(map(way.holds, parts))}
    file = cache and cache / FILE
    kept = read(file)
    sizes = ", ".join(f"{rows} x {columns}" for rows, columns in (part.shape for part in parts))
    here = f"{machine()}, {name_of(parts[0].dtype)}, {sizes}"
    known = kept.get(here)
    gains = dict(known) if isinstance(known, dict) and all(type(gain) is float for gain in known.values()) else {}
    missing = possible.keys() - gains.keys()
    if missing:
        gains |= {name: gain_of(layer, possible[name]) for name in missing}
        write(file, {**kept, here: gains})
    return [possible[name] for name in sorted(possible, key=gains.__getitem__, reverse=True) if gains[name]]


def gain_of(layer: Layer, way: Way) -> float:
    """What a way gains with one row times its gain with several; 0 if that is too little, or its results differ."""
    originals = linears_of(layer)
    copies = linears_of(pack_layer(layer, way))
    one, several = (speedup(originals, copies, rows, way.max_error) for rows in COMPARED_ROWS)
    return one * several if min(max(one, several), one * several) >= LEAST_SPEEDUP else 0.0


def speedup(originals: list[Linear], copies: list[Linear], rows: int, max_error: float) -> float:
    """How many times as fast the copies are; 0 if they are wrong."""
    inputs = [torch.randn(rows, linear.weight.shape[1]) for linear in originals]
    for x, one, other in zip(inputs, originals, copies, strict=True):
        expected = one(x)
        if not (other(x) - expected).abs().max() <= max_error * expected.abs().max():
            return 0.0
    times = [(seconds(originals, inputs), seconds(copies, inputs)) for _ in range(MEASUREMENTS)]
    return min(before for before, _ in times) / min(after for _, after in times)


def linears_of(layer: Layer) -> list[Linear]:
    return [getattr(layer, name) for name in PROJECTIONS]


def seconds(linears: list[Linear], inputs: list[Tensor]) -> float:
    start = time.perf_counter()
    for x, linear in zip(inputs, linears, strict=True):
        linear(x)
    return time.perf_counter() - start


def pack_layer(layer: Layer, way: Way) -> Layer:
    parts: dict[str, Any] = {name: way.pack(getattr(layer, name)) for name in PROJECTIONS}
    # Norms are computed in float32: gains that are narrower would be converted at every call.
    parts |= {name: gain.float() for name in NORMS if (gain := getattr(layer, name)) is not None}
    return replace(layer, **parts)


def pack(linear: Linear) -> PackedLinear:
    return PackedLinear(linear.weight, linear.bias, torch.ops.mkldnn._reorder_linear_weight(linear.weight, ROWS))


def pack_half(linear: Linear) -> HalfLinear:
    return HalfLinear(linear.weight, linear.bias, in_half(linear))


def pack_narrow(linear: Linear) -> NarrowLinear:
    return NarrowLinear(linear.weight, linear.bias, in_half(linear), pack(linear).packed)


def in_half(linear: Linear) -> Any:
    bias = None if linear.bias is None else linear.bias.float()
    return torch.ops.quantized.linear_prepack_fp16(linear.weight.float(), bias)


BLOCKS = Way(torch.float32, pack, lambda weight: True, 1e-4)
#: Its results are off by 0.0003 at most; those of bfloat16 by ten times as much.
HALF = Way(torch.float16, pack_half, fits_float16, 1e-3)
#: Compared with products whose inputs are rounded to bfloat16.
NARROW = Way(torch.bfloat16, pack_narrow, fits_float16, 2e-2, copies=2)

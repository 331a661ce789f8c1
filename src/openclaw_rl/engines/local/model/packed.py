"""A second copy of the weights, in the blocks in which a CPU multiplies them, for products of several rows.

A product of a few rows takes most of its time to arrange the weights in blocks, again at every call. oneDNN can keep
them arranged. The numbers are the same, in float32. A single row is computed from the weights as they are, which is
faster.
"""

import time
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Layer, Linear
from openclaw_rl.engines.usable_memory import usable_memory

#: The rows for which the blocks are laid out and the two ways are compared. Other numbers of rows work too.
ROWS = 8
#: The copy is made only if its products are so many times as fast.
LEAST_SPEEDUP = 1.15
#: The largest share of the free memory that the copy may take.
MAX_MEMORY_SHARE = 1 / 8
#: Results may differ by this share of the largest one: by more than float32 does, and less than bfloat16 would.
MAX_ERROR = 1e-4
MEASUREMENTS = 5


@dataclass(slots=True)
class PackedLinear(Linear):
    """A projection with both copies of its weight."""

    packed: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


@dataclass(slots=True)
class PackedDecoder(Decoder):
    """A decoder whose projections and head are packed."""

    packed_head: Linear | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.packed_head is not None
        return self.packed_head(hidden)


@torch.inference_mode()
def packed(decoder: Decoder, choice: str) -> Decoder:
    """The decoder with a packed copy of its weights, or as it is.

    `choice` is on, off, or auto: if the copy makes this machine faster and fits into the free memory. It is never made
    where PyTorch cannot make it: for other devices and precisions, and in builds without oneDNN.
    """
    if choice == "off" or not can_pack(decoder):
        return decoder
    if choice == "auto" and not (fits(decoder) and pays(decoder.layers[0])):
        return decoder
    shared = {field.name: getattr(decoder, field.name) for field in fields(Decoder)}
    layers = [pack_layer(layer) for layer in decoder.layers]
    return PackedDecoder(**{**shared, "layers": layers}, packed_head=pack(Linear(decoder.head)))


def can_pack(decoder: Decoder) -> bool:
    return has_packed_products() and decoder.embed.device.type == "cpu" and decoder.embed.dtype == torch.float32


def has_packed_products() -> bool:
    """Whether this PyTorch has them."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    # They are not part of PyTorch's public interface, so another version may not have them.
    return has_onednn and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def fits(decoder: Decoder) -> bool:
    return packed_bytes(decoder) <= usable_memory() * MAX_MEMORY_SHARE


def packed_bytes(decoder: Decoder) -> int:
    """The memory of a packed copy."""
    weights = [linear.weight for layer in decoder.layers for linear in linears_of(layer)]
    return sum(weight.nbytes for weight in [*weights, decoder.head])


def pays(layer: Layer) -> bool:
    """Whether a packed layer gives the same results here, faster."""
    plain, blocks = (linears_of(one) for one in (layer, pack_layer(layer)))
    inputs = [torch.randn(ROWS, linear.weight.shape[1]) for linear in plain]
    for x, one, other in zip(inputs, plain, blocks, strict=True):
        expected = one(x)
        if (other(x) - expected).abs().max() > MAX_ERROR * expected.abs().max():
            return False
    times = [(seconds(plain, inputs), seconds(blocks, inputs)) for _ in range(MEASUREMENTS)]
    return min(before for before, _ in times) >= LEAST_SPEEDUP * min(after for _, after in times)


def linears_of(layer: Layer) -> list[Linear]:
    return [getattr(layer, name) for name in PROJECTIONS]


def seconds(linears: list[Linear], inputs: list[Tensor]) -> float:
    start = time.perf_counter()
    for x, linear in zip(inputs, linears, strict=True):
        linear(x)
    return time.perf_counter() - start


def pack_layer(layer: Layer) -> Layer:
    return replace(layer, qkv=pack(layer.qkv), o=pack(layer.o), gate_up=pack(layer.gate_up), down=pack(layer.down))


def pack(linear: Linear) -> PackedLinear:
    return PackedLinear(linear.weight, linear.bias, torch.ops.mkldnn._reorder_linear_weight(linear.weight, ROWS))

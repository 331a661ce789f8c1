"""The decoder's forward pass for sampling on CUDA: the same function as `Decoder.forward`, as fused kernels.

Everything between two matrix products is one kernel. With very few rows, the products themselves are kernels that
include it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.model import kernels, thin_products
from openclaw_rl.engines.local.model.decoder import Adapt, Decoder, Linear, Projection, project
from openclaw_rl.engines.local.model.thin_products import RowAdapters
from openclaw_rl.engines.local.sampling.head_kernels import place_heads
from openclaw_rl.engines.local.sampling.runner import PolicyWeights

#: attend(layer, queries [tokens, heads, dim]) → [tokens, heads * dim]; the step's keys and values are in the cache.
AttendPages = Callable[[int, Tensor], Tensor]


class CudaBatch(NamedTuple):
    """The tokens of a step: a flat run."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    """Where in the cache each token's key and value go; negative for padding."""
    attend: AttendPages


class Pages(NamedTuple):
    """The memory of keys and of values: [layers, pages, page, kv heads, dim] each."""

    keys: Tensor
    values: Tensor


def hidden_states(decoder: Decoder, pages: Pages, batch: CudaBatch, adapt: Adapt | None = None) -> Tensor:
    """Final hidden states [tokens, hidden]."""
    shape, place = decoder.shape, _Placing(decoder, pages, batch)
    residual = F.embedding(batch.ids, decoder.embed)
    x = kernels.rms_norm(residual, decoder.layers[0].input_norm, shape.eps)
    for i, layer in enumerate(decoder.layers):
        queries = place(i, project(i, "qkv", layer.qkv, x, adapt))
        x = project(i, "o", layer.o, batch.attend(i, queries), adapt)
        x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, shape.eps)
        x = kernels.silu_mul(project(i, "gate_up", layer.gate_up, x, adapt))
        x = project(i, "down", layer.down, x, adapt)
        norm = decoder.norm if i + 1 == shape.layers else decoder.layers[i + 1].input_norm
        x, residual = kernels.add_rms_norm(x, residual, norm, shape.eps)
    return x


def next_logits(decoder: Decoder, pages: Pages, batch: CudaBatch, adapted: "AdaptedRows | None" = None) -> Tensor:
    """Scores over the vocabulary after each token, in the dtype of the weights."""
    if len(batch.ids) > thin_products.MAX_ROWS:
        adapt = None if adapted is None else adapted.masked(decoder.embed.dtype)
        return F.linear(hidden_states(decoder, pages, batch, adapt), decoder.head)
    shape, place = decoder.shape, _Placing(decoder, pages, batch)
    residual = F.embedding(batch.ids, decoder.embed)

    def adapters(i: int, projection: Projection) -> RowAdapters | None:
        return None if adapted is None else adapted.factors(i, projection)

    for i, layer in enumerate(decoder.layers):
        norms = (layer.input_norm, shape.eps), (layer.post_norm, shape.eps)
        qkv = thin_products.norm_product(residual, norms[0], layer.qkv, adapters(i, "qkv"))
        attended = batch.attend(i, place(i, qkv))
        residual = thin_products.product_plus(attended, layer.o, residual, adapters(i, "o"))
        gated = thin_products.norm_gated_product(residual, norms[1], layer.gate_up, adapters(i, "gate_up"))
        residual = thin_products.product_plus(gated, layer.down, residual, adapters(i, "down"))
    return thin_products.norm_product(residual, (decoder.norm, shape.eps), Linear(decoder.head))


class AdaptedRows(NamedTuple):
    """Adapters for rows of one token, chosen by the values of a tensor, as a CUDA graph needs it."""

    policies: PolicyWeights
    slots: Tensor
    """Of each row; 0 for none."""

    def masked(self, dtype: torch.dtype) -> Adapt:
        numbers = torch.arange(1, self.policies.slots + 1, device=self.slots.device)
        return self.policies.adapt_masked((self.slots[:, None] == numbers).to(dtype))

    def factors(self, layer: int, projection: Projection) -> RowAdapters:
        return RowAdapters(*self.policies.factors(layer, projection), self.slots)


class _Placing:
    """Takes the queries out of a layer's fused projection and puts its keys and values into the cache."""

    def __init__(self, decoder: Decoder, pages: Pages, batch: CudaBatch) -> None:
        self.decoder, self.pages, self.slots = decoder, pages, batch.slots
        self.angles = decoder.angles(batch.positions)

    def __call__(self, i: int, qkv: Tensor) -> Tensor:
        shape, layer = self.decoder.shape, self.decoder.layers[i]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        angles = self.angles if shape.rotary_layers[i] else None
        return place_heads(qkv, angles, norms, shape.eps, self.pages.keys[i], self.pages.values[i], self.slots)

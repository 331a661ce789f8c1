"""The forward pass on CUDA: fused kernels over a paged key-value cache.

Everything between two matrix products is one kernel. With one row, the products themselves are kernels that include it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model import kernels, thin_products
from openclaw_rl.engines.local.model.adapter_kernels import DECODE_ROWS, AdapterTiles, expand, shrink
from openclaw_rl.engines.local.model.decoder import Decoder, Shape
from openclaw_rl.engines.local.model.kernels import place_heads
from openclaw_rl.engines.local.model.language_model import Projection
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.thin_products import RowAdapters
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE
from openclaw_rl.engines.local.sampling.paged_attention import PromptRun, paged_decode, paged_prompts, tiles
from openclaw_rl.engines.local.sampling.runner import PolicyWeights, allocate, on_device
from openclaw_rl.engines.local.sampling.scheduler import Work

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


@functools.cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """For what is computed beside the stream of steps."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StepAdapters(NamedTuple):
    """The adapters of a step's rows, chosen by the values of tensors, as a CUDA graph needs it."""

    policies: PolicyWeights
    tiles: AdapterTiles
    slots: Tensor
    """Of each row; 0 for none. Only read for rows of one token each."""

    def project(
        self, layer: int, projection: Projection, linear: Callable[[Tensor], Tensor], x: Tensor, gated: bool = False
    ) -> Tensor:
        """A projection, with the adapters of its rows, and then with its gate."""
        factors = self.policies.factors(layer, projection)
        if x.is_cuda and self.tiles.rows == DECODE_ROWS:
            # With few rows neither product keeps the whole GPU busy, so that both run at once.
            here, beside = torch.cuda.current_stream(), second_stream(x.device)
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                inner = shrink(x, factors, self.tiles)
            y = linear(x)
            here.wait_stream(beside)
        else:
            inner = shrink(x, factors, self.tiles)
            y = linear(x)
        return expand(y, inner, factors, self.tiles, gated=gated)

    def of_rows(self, layer: int, projection: Projection) -> RowAdapters:
        return RowAdapters(self.policies.factors(layer, projection), self.slots, self.tiles)


def hidden_states(decoder: Decoder, pages: Pages, batch: CudaBatch, adapters: StepAdapters | None = None) -> Tensor:
    """Final hidden states [tokens, hidden]."""
    shape = decoder.shape
    place = _Placing(decoder, pages, batch)

    def project(i: int, name: Projection, linear: Linear, x: Tensor) -> Tensor:
        return linear(x) if adapters is None else adapters.project(i, name, linear, x)

    residual = F.embedding(batch.ids, decoder.embed)
    x = kernels.rms_norm(residual, decoder.layers[0].input_norm, shape.eps)
    for i, layer in enumerate(decoder.layers):
        queries = place(i, project(i, "qkv", layer.qkv, x))
        x = project(i, "o", layer.o, batch.attend(i, queries))
        x, residual = kernels.add_rms_norm(x, residual, layer.post_norm, shape.eps)
        if adapters is None:
            x = kernels.silu_mul(layer.gate_up(x))
        else:
            x = adapters.project(i, "gate_up", layer.gate_up, x, gated=True)
        x = project(i, "down", layer.down, x)
        norm = decoder.norm if i + 1 == shape.layers else decoder.layers[i + 1].input_norm
        x, residual = kernels.add_rms_norm(x, residual, norm, shape.eps)
    return x


def next_logits(decoder: Decoder, pages: Pages, batch: CudaBatch, adapters: StepAdapters | None = None) -> Tensor:
    """Scores over the vocabulary after each token, in the dtype of the weights."""
    # With more rows the tensor cores are faster: 2.5 ms for two rows at the shape of Qwen3-4B on an H200, 3.4 ms here.
    if len(batch.ids) > 1 or decoder.layers[0].quantised:
        return F.linear(hidden_states(decoder, pages, batch, adapters), decoder.head)
    shape = decoder.shape
    place = _Placing(decoder, pages, batch)
    residual = F.embedding(batch.ids, decoder.embed)

    def adapted(i: int, projection: Projection) -> RowAdapters | None:
        return None if adapters is None else adapters.of_rows(i, projection)

    for i, layer in enumerate(decoder.layers):
        norms = (layer.input_norm, shape.eps), (layer.post_norm, shape.eps)
        qkv = thin_products.norm_product(residual, norms[0], layer.qkv, adapted(i, "qkv"))
        attended = batch.attend(i, place(i, qkv))
        residual = thin_products.product_plus(attended, layer.o, residual, adapted(i, "o"))
        gated = thin_products.norm_gated_product(residual, norms[1], layer.gate_up, adapted(i, "gate_up"))
        residual = thin_products.product_plus(gated, layer.down, residual, adapted(i, "down"))
    return thin_products.norm_product(residual, (decoder.norm, shape.eps), Linear(decoder.head))


class _Placing:
    """Takes the queries out of a layer's fused projection and puts its keys and values into the cache."""

    def __init__(self, decoder: Decoder, pages: Pages, batch: CudaBatch) -> None:
        self.decoder = decoder
        self.pages = pages
        self.slots = batch.slots
        self.angles = decoder.angles(batch.positions)

    def __call__(self, i: int, qkv: Tensor) -> Tensor:
        shape = self.decoder.shape
        layer = self.decoder.layers[i]
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        angles = self.angles if shape.rotary_layers[i] else None
        return place_heads(qkv, angles, norms, shape.eps, self.pages.keys[i], self.pages.values[i], self.slots)


class CudaKVCache:
    """Rows of one token go through one kernel over the page tables, and all prompts of a step through another."""

    def __init__(self, shape: Shape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._scale = 1 / math.sqrt(shape.head_dim)
        self.pages = Pages(*allocate(shape, pages, dtype, device))

    def batch(self, work: Sequence[Work]) -> CudaBatch:
        """The tokens of a step that reads prompts; `work` has the rows of one token first."""
        columns = on_device(token_columns(work), self.device)
        return CudaBatch(columns[0], columns[1], columns[2], self._attend(work))

    def prompts(self, table: Tensor, tiles: Tensor) -> AttendPages:
        """Any number of new tokens per row of the table. All that varies is in tensors."""
        return self._attend_to(None, (table, tiles))

    def decode(self, table: Tensor, lengths: Tensor) -> AttendPages:
        """One new token per row. All that varies is in tensors, as a CUDA graph needs it."""
        return self._attend_to((table, lengths), None)

    def _attend(self, work: Sequence[Work]) -> AttendPages:
        single = sum(item.count == 1 for item in work)
        table = on_device(page_table([item.sequence.pages for item in work]), self.device)
        lengths = on_device(np.asarray([item.stop for item in work[:single]], np.int32), self.device)
        prompt_tiles = on_device(self.tiles(work[single:], single), self.device)
        return self._attend_to(
            (table[:single], lengths) if single else None, (table[single:], prompt_tiles) if len(prompt_tiles) else None
        )

    def _attend_to(self, rows: tuple[Tensor, Tensor] | None, prompts: tuple[Tensor, Tensor] | None) -> AttendPages:
        """Attention of rows of one token (their page table and lengths), then of prompts (page table and tiles)."""

        def attend(layer: int, q: Tensor) -> Tensor:
            keys = self.pages.keys[layer]
            values = self.pages.values[layer]
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if rows is not None:
                single = len(rows[1])
                paged_decode(q[:single], keys, values, *rows, self._scale, out[:single])
            if prompts is not None:
                paged_prompts(q, keys, values, *prompts, self._scale, out)
            return out.flatten(1)

        return attend

    def tiles(self, work: Sequence[Work], place: int = 0) -> NDArray[np.int32]:
        """The tiles of prompts whose tokens begin at a place in the step's run."""
        runs = []
        for item in work:
            runs.append(PromptRun(place, item.start, item.count))
            place += item.count
        return np.asarray(tiles(runs, self.shape.heads // self.shape.kv_heads), np.int32).reshape(-1, 4)


def token_columns(work: Sequence[Work]) -> NDArray[np.int32]:
    """[3, tokens]: the ids of a step's tokens, their positions, and their slots in the cache."""
    positions = [np.arange(item.start, item.stop, dtype=np.int32) for item in work]
    slots = [
        np.asarray(item.sequence.pages, np.int32)[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        for item, places in zip(work, positions, strict=True)
    ]
    ids = np.asarray([token for item in work for token in item.sequence.tokens[item.start : item.stop]], np.int32)
    return np.stack([ids, np.concatenate(positions), np.concatenate(slots)])


def page_table(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """The pages of each sequence, padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table

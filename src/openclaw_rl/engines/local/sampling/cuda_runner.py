"""Runs steps on CUDA: the forward pass as fused kernels, over a paged key-value cache.

Everything between two matrix products is one kernel. With very few rows, the products themselves are kernels that
include it.

A step in which every sequence generates one token is replayed from a captured graph, with the drawing of tokens in it:
at one token per sequence, launching the kernels one by one takes longer than the kernels do.

All work of the device is in one stream, so that whatever is started later sees what was started before: a step may be
started while another runs, and pages may be given to others while a step that writes to them runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model import kernels, thin_products
from openclaw_rl.engines.local.model.adapter_kernels import (
    DECODE_ROWS,
    PROMPT_ROWS,
    AdapterTiles,
    cut_tiles,
    expand_add,
    most_tiles,
    shrink,
)
from openclaw_rl.engines.local.model.decoder import PROJECTIONS, Decoder, Shape
from openclaw_rl.engines.local.model.kernels import place_heads
from openclaw_rl.engines.local.model.language_model import Projection
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.thin_products import RowAdapters
from openclaw_rl.engines.local.sampling.draw import MIN_TEMPERATURE, is_truncated
from openclaw_rl.engines.local.sampling.draw_kernels import draw_tokens, draw_truncated
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE
from openclaw_rl.engines.local.sampling.paged_attention import ROWS_BLOCK, PromptRun, paged_decode, paged_prompts, tiles
from openclaw_rl.engines.local.sampling.runner import (
    PolicyWeights,
    Runner,
    StepLogits,
    adapter_spans,
    allocate,
    on_device,
    read_scores,
)
from openclaw_rl.engines.local.sampling.scheduler import Sequence as Completion
from openclaw_rl.engines.local.sampling.scheduler import Work, pages_for
from openclaw_rl.types import SamplingParams

#: attend(layer, queries [tokens, heads, dim]) → [tokens, heads * dim]; the step's keys and values are in the cache.
AttendPages = Callable[[int, Tensor], Tensor]
#: Graphs are captured for these numbers of rows (and no more than the engine allows); others are padded up.
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


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


class StepAdapters(NamedTuple):
    """The adapters of a step's rows, chosen by the values of tensors, as a CUDA graph needs it."""

    policies: PolicyWeights
    tiles: AdapterTiles
    slots: Tensor
    """Of each row; 0 for none. Only read for rows of one token each."""

    def project(self, layer: int, projection: Projection, linear: Linear, x: Tensor) -> Tensor:
        """A projection, with the adapters of its rows."""
        factors = self.policies.factors(layer, projection)
        inner = shrink(x, factors, self.tiles)
        y = linear(x)
        expand_add(y, inner, factors, self.tiles)
        return y


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
        x = kernels.silu_mul(project(i, "gate_up", layer.gate_up, x))
        x = project(i, "down", layer.down, x)
        norm = decoder.norm if i + 1 == shape.layers else decoder.layers[i + 1].input_norm
        x, residual = kernels.add_rms_norm(x, residual, norm, shape.eps)
    return x


def next_logits(decoder: Decoder, pages: Pages, batch: CudaBatch, adapters: StepAdapters | None = None) -> Tensor:
    """Scores over the vocabulary after each token, in the dtype of the weights."""
    if len(batch.ids) > thin_products.MAX_ROWS or decoder.layers[0].quantised:
        return F.linear(hidden_states(decoder, pages, batch, adapters), decoder.head)
    shape = decoder.shape
    place = _Placing(decoder, pages, batch)
    residual = F.embedding(batch.ids, decoder.embed)
    counters = torch.zeros((shape.layers, len(PROJECTIONS), 1), dtype=torch.int32, device=residual.device)

    def adapted(i: int, projection: Projection) -> RowAdapters | None:
        if adapters is None:
            return None
        arrivals = counters[i, PROJECTIONS.index(projection)]
        return RowAdapters(adapters.policies.factors(i, projection), adapters.slots, arrivals)

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
        positions = [np.arange(item.start, item.stop, dtype=np.int32) for item in work]
        slots = [
            np.asarray(item.sequence.pages, np.int32)[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            for item, places in zip(work, positions, strict=True)
        ]
        ids = np.asarray([token for item in work for token in item.sequence.tokens[item.start : item.stop]], np.int32)
        columns = on_device(np.stack([ids, np.concatenate(positions), np.concatenate(slots)]), self.device)
        return CudaBatch(columns[0], columns[1], columns[2], self._attend(work))

    def decode(self, table: Tensor, lengths: Tensor) -> AttendPages:
        """One new token per row. All that varies is in tensors, as a CUDA graph needs it."""

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            self._attend_single(layer, q, table, lengths, out)
            return out.flatten(1)

        return attend

    def _attend(self, work: Sequence[Work]) -> AttendPages:
        single = sum(item.count == 1 for item in work)
        table = on_device(page_table([item.sequence.pages for item in work]), self.device)
        lengths = on_device(np.asarray([item.stop for item in work[:single]], np.int32), self.device)
        prompts = []
        place = single
        for item in work[single:]:
            prompts.append(PromptRun(place, item.start, item.count))
            place += item.count
        cut = np.asarray(tiles(prompts, self.shape.heads // self.shape.kv_heads), np.int32).reshape(-1, 4)
        prompt_tiles = on_device(cut, self.device)

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            if single:
                self._attend_single(layer, q[:single], table[:single], lengths, out[:single])
            if prompts:
                keys = self.pages.keys[layer]
                values = self.pages.values[layer]
                paged_prompts(q, keys, values, table[single:], prompt_tiles, self._scale, out)
            return out.flatten(1)

        return attend

    def _attend_single(self, layer: int, q: Tensor, table: Tensor, lengths: Tensor, out: Tensor) -> None:
        paged_decode(q, self.pages.keys[layer], self.pages.values[layer], table, lengths, self._scale, out)


def page_table(rows: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """The pages of each sequence, padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, pages in zip(table, rows, strict=True):
        row[: len(pages)] = pages
    return table


class GraphKey(NamedTuple):
    """Which steps a captured graph can replay."""

    rows: int
    slot: int
    """Whose weights it reads."""
    adapted: bool


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step: write the inputs into its tensors, replay, read what it drew."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    drawn: Tensor


class GraphInputs:
    """The inputs of every graph, one row per sequence, in memory that stays in place.

    Padding rows write nothing to the cache and read nothing from it.
    """

    def __init__(self, max_sequences: int, max_context: int, device: torch.device) -> None:
        self.device = device
        self._columns = torch.zeros(11, max_sequences, dtype=torch.int32, device=device)
        self.ids, self.positions, self.slots, self.lengths, self.adapters, self._drawn_by = self._columns[:6]
        self.uniforms, self.temperatures = self._columns[6:8].view(torch.float32)
        self.tiles = self._columns[8:]
        self.table = torch.zeros(max_sequences, pages_for(max_context), dtype=torch.int32, device=device)
        self._table = np.zeros(self.table.shape, np.int32)
        self._pages: list[tuple[list[int], int]] = [([], 0)] * max_sequences
        """What each row of the table holds: a sequence's list of pages, and how many of them."""

    def write(self, work: Sequence[Work], uniforms: Sequence[float], drawn: Tensor | None = None) -> None:
        """`drawn`: what the step before drew, if the rows' tokens are among these; the host may not know them yet."""
        columns = np.zeros(self._columns.shape, np.int32)
        columns[2] = -1
        rows = slice(0, len(work))
        sequences = [item.sequence for item in work]
        starts = np.asarray([item.start for item in work], np.int32)
        pages = np.asarray([item.sequence.pages[item.start // PAGE_SIZE] for item in work], np.int32)
        if drawn is None:
            columns[0, rows] = [item.sequence.tokens[item.start] for item in work]
        else:
            columns[5, rows] = [item.drawn_by for item in work]
        columns[1, rows] = starts
        columns[2, rows] = pages * PAGE_SIZE + starts % PAGE_SIZE
        columns[3, rows] = starts + 1
        columns[4, rows] = [sequence.slot for sequence in sequences]
        columns[6:8].view(np.float32)[:, rows] = uniforms, [temperature(sequence.params) for sequence in sequences]
        tiles = cut_tiles(adapter_spans(work), DECODE_ROWS)
        columns[8:, : tiles.shape[1]] = tiles
        self._columns.copy_(torch.from_numpy(columns).pin_memory(), non_blocking=True)
        if drawn is not None:
            torch.index_select(drawn, 0, self._drawn_by[rows], out=self.ids[rows])
        self._write_table(sequences)

    def _write_table(self, sequences: Sequence[Completion]) -> None:
        """Pages are only ever added to a sequence's list, so that most rows stay as they are."""
        changed = False
        for row, sequence in enumerate(sequences):
            pages = sequence.pages
            count = len(sequence.pages)
            held, known = self._pages[row]
            if held is pages and known == count:
                continue
            self._table[row, :count] = pages
            self._pages[row] = pages, count
            changed = True
        if changed:
            block = len(sequences), max(len(sequence.pages) for sequence in sequences)
            self.table[: block[0], : block[1]] = on_device(self._table[: block[0], : block[1]], self.device)


def temperature(params: SamplingParams) -> float:
    """As the kernels take it: 0 for the likeliest token."""
    return params.temperature if params.temperature >= MIN_TEMPERATURE else 0.0


def redraw(rows: StepLogits, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> None:
    """Draw again, in place, where only the likeliest tokens are possible. The host does not wait for it."""
    which = [row for row, one in enumerate(params) if is_truncated(one)]
    if not which or rows.drawn is None:
        return
    logits, vocabulary = rows.logits, rows.logits.shape[1]
    numbers = [(temperature(params[row]), uniforms[row], params[row].top_p) for row in which]
    likeliest = [min(params[row].top_k, vocabulary) for row in which]
    index = on_device(np.asarray(which, np.int64), logits.device)
    top_ks = on_device(np.asarray(likeliest, np.int32), logits.device) if any(likeliest) else None
    columns = on_device(np.ascontiguousarray(np.asarray(numbers, np.float32).T), logits.device)
    temperatures, chances, top_ps = columns
    drawn = draw_truncated(logits.index_select(0, index), temperatures, chances, top_ps, top_ks)
    rows.drawn.index_copy_(1, index, drawn)


class CudaRunner(Runner):
    """Replays graphs for steps without prompts. Graphs are captured when first needed and kept."""

    decoder: Decoder

    def __init__(
        self, decoder: Decoder, cache: CudaKVCache, policies: PolicyWeights, max_sequences: int, max_context: int
    ) -> None:
        super().__init__(decoder, policies)
        self.cache = cache
        self.device = decoder.embed.device
        self.sizes = [size for size in GRAPH_ROWS if size < max_sequences] + [max_sequences]
        self.inputs = GraphInputs(max_sequences, max_context, self.device)
        self.graphs: dict[GraphKey, DecodeGraph] = {}
        self.memory = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of the base model and compile the kernels of prompts, so that no request waits for it."""
        for rows in reversed(self.sizes):
            key = GraphKey(rows, slot=0, adapted=False)
            self.inputs.write([], [])
            self.graphs[key] = self._capture(key)
        nobody = Completion(0, 0, [0] * (ROWS_BLOCK + 1), SamplingParams(1), 0, 0, (0, 0))
        nobody.pages = [0] * pages_for(len(nobody.tokens))
        # One row generates and one is a prompt, as in a step that has both.
        self._run(0, [Work(nobody, ROWS_BLOCK, 1), Work(nobody, 0, ROWS_BLOCK)], [0.0], None)

    def _run(self, slot: int, work: Sequence[Work], uniforms: Sequence[float], drawn: Tensor | None) -> StepLogits:
        if len(uniforms) < len(work) or any(item.count > 1 for item in work):
            return self._run_prompts(slot, work, uniforms)
        size = next(size for size in self.sizes if size >= len(work))
        key = GraphKey(size, slot, adapted=not slot and any(item.sequence.slot for item in work))
        self.inputs.write(work, uniforms, drawn)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.graphs[key] = self._capture(key)
        graph.graph.replay()
        rows = StepLogits(graph.logits[: len(work)], graph.drawn[:, : len(work)])
        redraw(rows, [item.sequence.params for item in work], uniforms)
        return rows

    def _run_prompts(self, slot: int, work: Sequence[Work], uniforms: Sequence[float]) -> StepLogits:
        decoder = self.policies.model(slot) or self.decoder
        batch = self.cache.batch(work)
        hidden = hidden_states(decoder, self.cache.pages, batch, None if slot else self._adapters(work))
        logits = F.linear(hidden[read_scores(decoder, work, hidden)], decoder.head)
        if not uniforms:
            return StepLogits(logits)
        params = [item.sequence.params for item in work if item.draws]
        chances = on_device(np.asarray([[*map(temperature, params)], uniforms], np.float32), self.device)
        rows = StepLogits(logits, draw_tokens(logits, *chances))
        redraw(rows, params, uniforms)
        return rows

    def _adapters(self, work: Sequence[Work]) -> StepAdapters | None:
        tiles = on_device(cut_tiles(adapter_spans(work), PROMPT_ROWS), self.device)
        return StepAdapters(self.policies, AdapterTiles(tiles, PROMPT_ROWS), tiles[2]) if tiles.numel() else None

    def _capture(self, key: GraphKey) -> DecodeGraph:
        rows = key.rows
        decoder = self.policies.model(key.slot) or self.decoder
        inputs = self.inputs
        attend = self.cache.decode(inputs.table[:rows], inputs.lengths[:rows])
        batch = CudaBatch(inputs.ids[:rows], inputs.positions[:rows], inputs.slots[:rows], attend)
        tiles = AdapterTiles(inputs.tiles[:, : most_tiles(rows, self.policies.slots)], DECODE_ROWS)
        adapters = StepAdapters(self.policies, tiles, inputs.adapters[:rows]) if key.adapted else None

        def forward() -> tuple[Tensor, Tensor]:
            logits = next_logits(decoder, self.cache.pages, batch, adapters)
            return logits, draw_tokens(logits, inputs.temperatures[:rows], inputs.uniforms[:rows])

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # compiles kernels and sizes work spaces, which must not happen while capturing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            logits, drawn = forward()
        return DecodeGraph(graph, logits, drawn)

"""Runs steps on CUDA, from captured graphs wherever launching the kernels one by one would take longer than they do.

A step in which every sequence generates one token has the drawing of tokens in its graph. Steps that read few tokens of
prompts have graphs up to the hidden states.

All work of the device is in one stream, so that whatever is started later sees what was started before: a step may be
started while another runs, and pages may be given to others while a step that writes to them runs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model.adapter_kernels import (
    DECODE_ROWS,
    PROMPT_ROWS,
    AdapterTiles,
    cut_tiles,
    most_tiles,
)
from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.sampling.cuda_forward import (
    CudaBatch,
    CudaKVCache,
    StepAdapters,
    hidden_states,
    next_logits,
    page_table,
    token_columns,
)
from openclaw_rl.engines.local.sampling.draw import MIN_TEMPERATURE, is_truncated
from openclaw_rl.engines.local.sampling.draw_kernels import draw_tokens, draw_truncated
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE
from openclaw_rl.engines.local.sampling.paged_attention import ROWS_BLOCK, tile_tokens
from openclaw_rl.engines.local.sampling.runner import (
    PolicyWeights,
    Runner,
    StepLogits,
    adapter_spans,
    on_device,
    read_scores,
)
from openclaw_rl.engines.local.sampling.scheduler import Sequence as Completion
from openclaw_rl.engines.local.sampling.scheduler import Work, pages_for
from openclaw_rl.types import SamplingParams

Result = TypeVar("Result")
#: Graphs are captured for these numbers of rows (and no more than the engine allows); others are padded up.
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
#: The same for the tokens of steps that read prompts. With more tokens, the kernels take longer than launching them.
PROMPT_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
#: Sequences in such a step, and tokens before those it reads: a longer one would be attended to by too few programs.
PROMPT_RUNS, PROMPT_CONTEXT = 16, 8192


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


@dataclass(frozen=True, slots=True)
class PromptGraph:
    """A captured step that reads prompts, up to the hidden states."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor


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


class PromptInputs:
    """The inputs of every graph of prompts, in memory that stays in place. What is not used is empty."""

    def __init__(self, cache: CudaKVCache, max_context: int) -> None:
        self.cache = cache

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=cache.device)

        self._columns = zeros(3, PROMPT_TOKENS[-1])
        # The prompt of the warm-up may be longer than the shortest contexts.
        self._table = zeros(PROMPT_RUNS, pages_for(max(max_context, ROWS_BLOCK + 1)))
        self._tiles = zeros(PROMPT_TOKENS[-1] + PROMPT_RUNS, 4)
        self._adapters = zeros(3, PROMPT_TOKENS[-1] // PROMPT_ROWS + PROMPT_RUNS)

    def size(self, work: Sequence[Work]) -> int | None:
        """For how many tokens the graph is that can run this step; None if there is none."""
        if len(work) > PROMPT_RUNS or any(item.start > PROMPT_CONTEXT for item in work):
            return None
        tokens = sum(item.count for item in work)
        return next((size for size in PROMPT_TOKENS if size >= tokens), None)

    def write(self, work: Sequence[Work], size: int) -> None:
        columns = np.zeros((3, size), np.int32)
        columns[2] = -1
        if work:
            found = token_columns(work)
            columns[:, : found.shape[1]] = found
            table = page_table([item.sequence.pages for item in work])
            self._table[: len(work), : table.shape[1]] = on_device(table, self.cache.device)
        self._columns[:, :size] = on_device(columns, self.cache.device)
        self._fill(self._tiles[: self._most_tiles(size)], self.cache.tiles(work))
        self._fill(self._adapters[:, : self._most_adapters(size)], cut_tiles(adapter_spans(work), PROMPT_ROWS))

    def batch(self, size: int) -> CudaBatch:
        attend = self.cache.prompts(self._table, self._tiles[: self._most_tiles(size)])
        ids, positions, slots = self._columns[:, :size]
        return CudaBatch(ids, positions, slots, attend)

    def adapters(self, policies: PolicyWeights, size: int) -> StepAdapters:
        table = self._adapters[:, : self._most_adapters(size)]
        return StepAdapters(policies, AdapterTiles(table, PROMPT_ROWS), table[2])

    def _fill(self, place: Tensor, values: NDArray[np.int32]) -> None:
        padded = np.zeros(place.shape, np.int32)
        padded[: values.shape[0], : values.shape[1]] = values
        place.copy_(on_device(padded, self.cache.device))

    def _most_tiles(self, size: int) -> int:
        shape = self.cache.shape
        return size // tile_tokens(shape.heads // shape.kv_heads) + PROMPT_RUNS

    def _most_adapters(self, size: int) -> int:
        return size // PROMPT_ROWS + PROMPT_RUNS


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


class GraphRunner(Runner):
    """Replays graphs for steps without prompts. Graphs are captured when first needed and kept."""

    def __init__(self, decoder: LanguageModel, policies: PolicyWeights, max_sequences: int, max_context: int) -> None:
        super().__init__(decoder, policies)
        self.device = decoder.embed.device
        self.sizes = [size for size in GRAPH_ROWS if size < max_sequences] + [max_sequences]
        self.inputs = GraphInputs(max_sequences, max_context, self.device)
        self.graphs: dict[GraphKey, DecodeGraph] = {}
        self.memory = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of the base model, so that no request waits for it."""
        for rows in reversed(self.sizes):
            key = GraphKey(rows, slot=0, adapted=False)
            self.inputs.write([], [])
            self.graphs[key] = self._capture(key)

    @abstractmethod
    def _run_prompts(self, slot: int, work: Sequence[Work], uniforms: Sequence[float]) -> StepLogits:
        """Run a step that reads prompts."""

    @abstractmethod
    def _forward(self, key: GraphKey) -> Callable[[], Tensor]:
        """What computes the logits of the rows in `self.inputs`."""

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

    def _drawn(self, logits: Tensor, work: Sequence[Work], uniforms: Sequence[float]) -> StepLogits:
        """Draw from the logits of those rows that draw."""
        if not uniforms:
            return StepLogits(logits)
        params = [item.sequence.params for item in work if item.draws]
        chances = on_device(np.asarray([[*map(temperature, params)], uniforms], np.float32), self.device)
        rows = StepLogits(logits, draw_tokens(logits, *chances))
        redraw(rows, params, uniforms)
        return rows

    def _adapters(self, key: GraphKey) -> StepAdapters | None:
        """The adapters of the rows in `self.inputs`."""
        if not key.adapted:
            return None
        tiles = self.inputs.tiles[:, : most_tiles(key.rows, self.policies.slots)]
        return StepAdapters(self.policies, AdapterTiles(tiles, DECODE_ROWS), self.inputs.adapters[: key.rows])

    def _capture(self, key: GraphKey) -> DecodeGraph:
        compute, rows = self._forward(key), slice(0, key.rows)

        def forward() -> tuple[Tensor, Tensor]:
            logits = compute()
            return logits, draw_tokens(logits, self.inputs.temperatures[rows], self.inputs.uniforms[rows])

        graph, (logits, drawn) = self._captured(forward)
        return DecodeGraph(graph, logits, drawn)

    def _captured(self, forward: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # compiles kernels and sizes work spaces, which must not happen while capturing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            result = forward()
        return graph, result


class CudaRunner(GraphRunner):
    """Runs our own decoder. Steps that read few tokens of prompts are graphs too."""

    decoder: Decoder
    wants_consecutive_pages = False

    def __init__(
        self, decoder: Decoder, cache: CudaKVCache, policies: PolicyWeights, max_sequences: int, max_context: int
    ) -> None:
        super().__init__(decoder, policies, max_sequences, max_context)
        self.cache = cache
        self.prompts = PromptInputs(cache, max_context)
        self.prompt_graphs: dict[GraphKey, PromptGraph] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the graphs of the base model and compile the kernels of prompts."""
        super().warm_up()
        nobody = Completion(0, 0, [0] * (ROWS_BLOCK + 1), SamplingParams(1), 0, 0, (0, 0))
        nobody.pages = [0] * pages_for(len(nobody.tokens))
        for size in reversed(PROMPT_TOKENS):
            self.prompts.write([], size)
            key = GraphKey(size, slot=0, adapted=False)
            self.prompt_graphs[key] = self._capture_prompts(key)
        # One row generates and one is a prompt, as in a step that has both, with and without a graph.
        work = [Work(nobody, ROWS_BLOCK, 1), Work(nobody, 0, ROWS_BLOCK)]
        self._run(0, work, [0.0], None)
        hidden_states(self.decoder, self.cache.pages, self.cache.batch(work))

    def _run_prompts(self, slot: int, work: Sequence[Work], uniforms: Sequence[float]) -> StepLogits:
        decoder = self.policies.model(slot) or self.decoder
        hidden = self._hidden(slot, decoder, work)
        logits = F.linear(hidden[read_scores(decoder, work, hidden)], decoder.head)
        return self._drawn(logits, work, uniforms)

    def _hidden(self, slot: int, decoder: Decoder, work: Sequence[Work]) -> Tensor:
        """Final hidden states of a step's tokens, and of padding."""
        adapted = not slot and any(item.sequence.slot for item in work)
        size = self.prompts.size(work)
        if size is None:
            tiles = on_device(cut_tiles(adapter_spans(work), PROMPT_ROWS), self.device)
            adapters = StepAdapters(self.policies, AdapterTiles(tiles, PROMPT_ROWS), tiles[2]) if adapted else None
            return hidden_states(decoder, self.cache.pages, self.cache.batch(work), adapters)
        key = GraphKey(size, slot, adapted)
        self.prompts.write(work, size)
        graph = self.prompt_graphs.get(key)
        if graph is None:
            graph = self.prompt_graphs[key] = self._capture_prompts(key)
        graph.graph.replay()
        return graph.hidden

    def _capture_prompts(self, key: GraphKey) -> PromptGraph:
        decoder = self.policies.model(key.slot) or self.decoder
        batch = self.prompts.batch(key.rows)
        adapters = self.prompts.adapters(self.policies, key.rows) if key.adapted else None
        graph, hidden = self._captured(lambda: hidden_states(decoder, self.cache.pages, batch, adapters))
        return PromptGraph(graph, hidden)

    def _forward(self, key: GraphKey) -> Callable[[], Tensor]:
        decoder = self.policies.model(key.slot) or self.decoder
        inputs, rows = self.inputs, slice(0, key.rows)
        attend = self.cache.decode(inputs.table[rows], inputs.lengths[rows])
        batch = CudaBatch(inputs.ids[rows], inputs.positions[rows], inputs.slots[rows], attend)
        return partial(next_logits, decoder, self.cache.pages, batch, self._adapters(key))

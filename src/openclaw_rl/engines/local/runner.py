"""Runs one planned step through the model and gives the logits to draw from.

On CUDA, a step in which every sequence generates one token is replayed from a captured graph: at one token a
sequence, launching the kernels one by one takes longer than the kernels do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from openclaw_rl.engines.local.adapters import AdapterSlots
from openclaw_rl.engines.local.decoder import Adapt, Decoder
from openclaw_rl.engines.local.kv_cache import CpuKVCache, CudaKVCache, token_slots
from openclaw_rl.engines.local.scheduler import Work, pages_for

#: Graphs are captured for these numbers of rows (and no more than the engine allows); others are padded up.
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Runner:
    """The model, its adapters and its cache, on the CPU or as they are for prompts on CUDA."""

    def __init__(self, decoder: Decoder, cache: CpuKVCache | CudaKVCache, adapters: AdapterSlots) -> None:
        self.decoder, self.cache, self.adapters = decoder, cache, adapters
        self.device = decoder.embed.device

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Tensor:
        """Run a step and score what is to be scored; float32 logits [rows that draw, vocabulary], in that order."""
        ids = [token for w in work for token in w.sequence.tokens[w.start : w.stop]]
        positions = [position for w in work for position in range(w.start, w.stop)]
        hidden = self.decoder.forward(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self.cache.attend(work),
            self.adapters.adapt(adapter_spans(work)),
        )
        ends, end = [], 0
        for item in work:
            end += item.count
            if item.draws:
                ends.append(end - 1)
            if item.sequence.scoring and item.scored:
                item.sequence.scoring.read(self.decoder, item.stop - item.scored, hidden[end - item.scored : end])
        return self.decoder.logits(hidden[ends])


def adapter_spans(work: Sequence[Work]) -> list[tuple[int, int, int]]:
    """(start, stop, slot) of the runs of tokens in a batch that use one adapter."""
    spans, start = [], 0
    for slot, items in groupby(work, key=lambda w: w.sequence.slot):
        stop = start + sum(item.count for item in items)
        spans.append((start, stop, slot))
        start = stop
    return spans


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured step: write the inputs into its tensors, replay, read the logits."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor


class CudaRunner(Runner):
    """Replays graphs for steps without prompts. Graphs are captured when first needed and kept."""

    cache: CudaKVCache

    def __init__(
        self,
        decoder: Decoder,
        cache: CudaKVCache,
        adapters: AdapterSlots,
        max_sequences: int,
        max_context: int,
    ) -> None:
        super().__init__(decoder, cache, adapters)
        self.sizes = [size for size in GRAPH_ROWS if size < max_sequences] + [max_sequences]
        long: Any = {"dtype": torch.long, "device": self.device}
        # One row of inputs a sequence, in the memory that every graph reads; padding rows write and read nothing.
        self.ids = torch.zeros(max_sequences, **long)
        self.positions = torch.zeros(max_sequences, **long)
        self.slots = torch.full((max_sequences,), -1, **long)
        self.lengths = torch.zeros(max_sequences, dtype=torch.int32, device=self.device)
        self.table = torch.zeros(max_sequences, pages_for(max_context), dtype=torch.int32, device=self.device)
        self.mask = torch.zeros(max_sequences, adapters.slots, dtype=decoder.embed.dtype, device=self.device)
        self.graphs: dict[tuple[int, bool], DecodeGraph] = {}
        self.memory = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Tensor:
        if not all(item.draws and item.count == 1 for item in work):
            return super().run(work)
        rows = next(size for size in self.sizes if size >= len(work))
        adapted = any(item.sequence.slot for item in work)
        self._write(work, rows, adapted)
        graph = self.graphs.get((rows, adapted))
        if graph is None:
            graph = self.graphs[rows, adapted] = self._capture(rows, adapted)
        graph.graph.replay()
        return graph.logits[: len(work)]

    def warm_up(self) -> None:
        """Capture the graphs of the base model, so that no request waits for it."""
        for rows in reversed(self.sizes):
            self._write([], rows, adapted=False)
            self.graphs[rows, False] = self._capture(rows, adapted=False)

    def _write(self, work: Sequence[Work], rows: int, adapted: bool) -> None:
        """Put the step's inputs where the graph reads them."""
        padding = rows - len(work)
        positions = [w.start for w in work] + [0] * padding
        ids = [w.sequence.tokens[w.start] for w in work] + [0] * padding
        slots = token_slots(work) + [-1] * padding
        columns = torch.tensor([ids, positions, slots]).pin_memory().to(self.device, non_blocking=True)
        self.ids[:rows], self.positions[:rows], self.slots[:rows] = columns
        self.lengths[: len(work)] = self.positions[: len(work)] + 1
        self.lengths[len(work) : rows] = 0
        if work:
            width = max(len(w.sequence.pages) for w in work)
            table = torch.tensor([w.sequence.pages + [0] * (width - len(w.sequence.pages)) for w in work])
            self.table[: len(work), :width].copy_(table.pin_memory(), non_blocking=True)
        if adapted:
            chosen = torch.tensor([w.sequence.slot for w in work] + [0] * padding, device=self.device)
            one_hot = chosen[:, None] == torch.arange(1, self.adapters.slots + 1, device=self.device)
            self.mask[:rows].copy_(one_hot)

    def _capture(self, rows: int, adapted: bool) -> DecodeGraph:
        adapt: Adapt | None = self.adapters.adapt_masked(self.mask[:rows]) if adapted else None
        attend = self.cache.decode(self.slots[:rows], self.table[:rows], self.lengths[:rows])

        def forward() -> Tensor:
            hidden = self.decoder.forward(self.ids[:rows], self.positions[:rows], attend, adapt)
            return self.decoder.logits(hidden)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # compiles kernels and sizes work spaces, which must not happen while capturing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            logits = forward()
        return DecodeGraph(graph, logits)

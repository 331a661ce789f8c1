"""Runs one planned step through the model and returns the logits to draw from.

On CUDA, a step in which every sequence generates one token is replayed from a captured graph: at one token per
sequence, launching the kernels one by one takes longer than the kernels do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Adapt, Decoder
from openclaw_rl.engines.local.sampling.kv_cache import CpuKVCache, CudaKVCache, token_slots
from openclaw_rl.engines.local.sampling.scheduler import Work, pages_for

#: Graphs are captured for these numbers of rows (and no more than the engine allows); others are padded up.
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class PolicyWeights(Protocol):
    """The weights of the policies, one per slot. Slot 0 is the base model."""

    slots: int

    def load(self, slot: int, folder: Path) -> Iterator[None]:
        """Load a policy into a slot, a piece per iteration; the model may run in between. Raises BadPolicy."""

    def model(self, slot: int) -> Decoder | None:
        """A slot's own weights; None if it computes with the base model's."""

    def adapt(self, spans: Sequence[tuple[int, int, int]]) -> Adapt | None: ...
    def adapt_masked(self, mask: Tensor) -> Adapt: ...


class Runner:
    """Runs the model with its policies and its cache: all steps on the CPU, steps with prompts on CUDA."""

    def __init__(self, decoder: Decoder, cache: CpuKVCache | CudaKVCache, policies: PolicyWeights) -> None:
        self.decoder, self.cache, self.policies = decoder, cache, policies
        self.device = decoder.embed.device

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Tensor:
        """Run a step, with its scoring. Returns float32 logits [rows that draw, vocabulary], in the order of `work`."""
        parts: dict[int, list[int]] = {}
        for i, item in enumerate(work):
            slot = item.sequence.slot
            parts.setdefault(slot if self.policies.model(slot) else 0, []).append(i)
        logits = [self._run(slot, [work[i] for i in indices]) for slot, indices in parts.items()]
        if len(logits) == 1:
            return logits[0]
        drawing = [i for indices in parts.values() for i in indices if work[i].draws]
        return torch.cat(logits)[sorted(range(len(drawing)), key=drawing.__getitem__)]

    def _run(self, slot: int, work: Sequence[Work]) -> Tensor:
        """Run the part of a step that uses the weights of one slot."""
        decoder = self.policies.model(slot) or self.decoder
        ids = [token for w in work for token in w.sequence.tokens[w.start : w.stop]]
        positions = [position for w in work for position in range(w.start, w.stop)]
        hidden = decoder.forward(
            torch.tensor(ids, device=self.device),
            torch.tensor(positions, device=self.device),
            self.cache.attend(work),
            self.policies.adapt(adapter_spans(work)),
        )
        ends, end = [], 0
        for item in work:
            end += item.count
            if item.draws:
                ends.append(end - 1)
            if item.sequence.scoring and item.scored:
                item.sequence.scoring.read(decoder, item.stop - item.scored, hidden[end - item.scored : end])
        return decoder.logits(hidden[ends])


def adapter_spans(work: Sequence[Work]) -> list[tuple[int, int, int]]:
    """(start, stop, slot) of the runs of tokens in a batch that use one adapter."""
    spans, start = [], 0
    for slot, items in groupby(work, key=lambda w: w.sequence.slot):
        stop = start + sum(item.count for item in items)
        spans.append((start, stop, slot))
        start = stop
    return spans


class GraphKey(NamedTuple):
    """Which steps a captured graph can replay."""

    rows: int
    slot: int
    """Whose weights it reads."""
    adapted: bool


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
        policies: PolicyWeights,
        max_sequences: int,
        max_context: int,
    ) -> None:
        super().__init__(decoder, cache, policies)
        self.sizes = [size for size in GRAPH_ROWS if size < max_sequences] + [max_sequences]
        long: Any = {"dtype": torch.long, "device": self.device}
        # One row of inputs per sequence, in the memory that every graph reads; padding rows write and read nothing.
        self.ids = torch.zeros(max_sequences, **long)
        self.positions = torch.zeros(max_sequences, **long)
        self.slots = torch.full((max_sequences,), -1, **long)
        self.lengths = torch.zeros(max_sequences, dtype=torch.int32, device=self.device)
        self.table = torch.zeros(max_sequences, pages_for(max_context), dtype=torch.int32, device=self.device)
        self.mask = torch.zeros(max_sequences, policies.slots, dtype=decoder.embed.dtype, device=self.device)
        self.graphs: dict[GraphKey, DecodeGraph] = {}
        self.memory = torch.cuda.graph_pool_handle()

    def _run(self, slot: int, work: Sequence[Work]) -> Tensor:
        if not all(item.draws and item.count == 1 for item in work):
            return super()._run(slot, work)
        rows = next(size for size in self.sizes if size >= len(work))
        key = GraphKey(rows, slot, adapted=not slot and any(item.sequence.slot for item in work))
        self._write(work, key)
        graph = self.graphs.get(key)
        if graph is None:
            graph = self.graphs[key] = self._capture(key)
        graph.graph.replay()
        return graph.logits[: len(work)]

    def warm_up(self) -> None:
        """Capture the graphs of the base model, so that no request waits for it."""
        for rows in reversed(self.sizes):
            key = GraphKey(rows, slot=0, adapted=False)
            self._write([], key)
            self.graphs[key] = self._capture(key)

    def _write(self, work: Sequence[Work], key: GraphKey) -> None:
        """Put the step's inputs where the graph reads them."""
        rows = key.rows
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
        if key.adapted:
            chosen = torch.tensor([w.sequence.slot for w in work] + [0] * padding, device=self.device)
            one_hot = chosen[:, None] == torch.arange(1, self.policies.slots + 1, device=self.device)
            self.mask[:rows].copy_(one_hot)

    def _capture(self, key: GraphKey) -> DecodeGraph:
        rows, decoder = key.rows, self.policies.model(key.slot) or self.decoder
        adapt: Adapt | None = self.policies.adapt_masked(self.mask[:rows]) if key.adapted else None
        attend = self.cache.decode(self.slots[:rows], self.table[:rows], self.lengths[:rows])

        def forward() -> Tensor:
            hidden = decoder.forward(self.ids[:rows], self.positions[:rows], attend, adapt)
            return decoder.logits(hidden)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # compiles kernels and sizes work spaces, which must not happen while capturing
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            logits = forward()
        return DecodeGraph(graph, logits)

"""Runs one planned step through the model, and draws the next tokens, with PyTorch alone.

On CUDA our own decoder has a faster runner (`cuda_runner`).

Keys and values are [layers, pages, page, kv heads, dim]. A step is what `scheduler` planned: rows of new tokens, each
of which attends to its own sequence and to nothing else, over a view where the sequence's pages are consecutive, which
they mostly are.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm, attend_last
from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.engines.local.model.language_model import Adapt, Attend, LanguageModel, Projection, Sizes
from openclaw_rl.engines.local.model.policy_slots import Factors
from openclaw_rl.engines.local.model.transformers_decoder import TransformersDecoder
from openclaw_rl.engines.local.sampling.draw import Draws, draw, top_tokens
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE
from openclaw_rl.engines.local.sampling.scheduler import Sequence as Completion
from openclaw_rl.engines.local.sampling.scheduler import Work, pages_for
from openclaw_rl.types import SamplingParams

CPU = torch.device("cpu")


def bytes_per_page(shape: Sizes, dtype: torch.dtype) -> int:
    """Memory of one page, over all layers."""
    return 2 * shape.layers * PAGE_SIZE * shape.kv_size * dtype.itemsize


def token_slots(work: Sequence[Work]) -> list[int]:
    """Where in the flat cache each new token's key and value go."""
    return [
        item.sequence.pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        for item in work
        for position in range(item.start, item.stop)
    ]


def allocate(shape: Sizes, pages: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for keys and for values. It is not filled: on the CPU, memory that is never used takes no room."""
    size = (shape.layers, pages, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    return torch.empty(size, dtype=dtype, device=device), torch.empty(size, dtype=dtype, device=device)


class RowKVCache:
    """One attention call per row: rows are few, and mixed lengths then cost no padding.

    Prompts attend in the precision of the `weights`, in which the processor multiplies several rows fastest; single
    tokens attend in that of the cache.
    """

    def __init__(
        self,
        shape: Sizes,
        pages: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        weights: torch.dtype | None = None,
    ) -> None:
        self.shape = shape
        self.device = device
        self.weights = weights or dtype
        keys, values = allocate(shape, pages, dtype, device)
        self.keys = keys.flatten(1, 2)
        self.values = values.flatten(1, 2)

    def attend(self, work: Sequence[Work]) -> Attend:
        slots = torch.tensor(token_slots(work), device=self.device)
        rows = [CacheRow(self, item) for item in work]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
            # In some families layers have heads of different sizes; the memory is as large as the largest.
            self.keys[layer, :, : k.shape[1], : k.shape[2]].index_copy_(0, slots, k)
            self.values[layer, :, : v.shape[1], : v.shape[2]].index_copy_(0, slots, v)
            outputs = []
            start = 0
            for row in rows:
                part = q[start : start + row.count]
                plain = form is PLAIN
                outputs.append(row.attend(layer, part) if plain else row.attend_as(layer, part, k, v, form))
                start += row.count
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

        return attend


class CacheRow:
    """One sequence's part of a step: its new queries against everything it has in the cache."""

    def __init__(self, cache: RowKVCache, work: Work) -> None:
        self.cache = cache
        self.count = work.count
        self.length = work.stop
        self.mask: Tensor | None = None
        pages = work.sequence.pages
        first = pages[0]
        self.index: Tensor | None = None
        if all(page == first + i for i, page in enumerate(pages)):
            span = slice(first * PAGE_SIZE, first * PAGE_SIZE + self.length)
            self.keys = cache.keys[:, None, span].transpose(2, 3).unbind(0)
            self.values = cache.values[:, None, span].transpose(2, 3).unbind(0)
        else:
            starts = torch.tensor(pages)[:, None] * PAGE_SIZE
            self.index = (starts + torch.arange(PAGE_SIZE)).flatten()[: self.length].to(cache.device)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, kv heads, length, dim]: a view if the pages are consecutive, else gathered."""
        if self.index is None:
            return self.keys[layer], self.values[layer]
        keys = self.cache.keys[layer].index_select(0, self.index)
        values = self.cache.values[layer].index_select(0, self.index)
        return keys.transpose(0, 1)[None], values.transpose(0, 1)[None]

    def attend(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self.read(layer)
        if self.count == 1:
            # The query heads that share a kv head see the same keys: they can be one block of queries.
            grouped = q.view(1, self.cache.shape.kv_heads, -1, q.shape[-1])
            return F.scaled_dot_product_attention(grouped, keys, values).view(1, -1)
        whole = self.count == self.length
        dtype = self.cache.weights
        if not whole and self.mask is None:
            self.mask = causal_mask(self.count, self.length, dtype).to(keys.device)
        queries, keys, values = (heads.to(dtype) for heads in (q.transpose(0, 1)[None], keys, values))
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self.mask, is_causal=whole, enable_gqa=True
        )
        return out[0].transpose(0, 1).reshape(self.count, -1).to(q.dtype)

    def attend_as(self, layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
        """With a form of attention, and heads of the size of `k` and `v`."""
        keys, values = (heads[0].transpose(0, 1) for heads in self.read(layer))
        return attend_last(q, keys[:, : k.shape[1], : k.shape[2]], values[:, : v.shape[1], : v.shape[2]], form)


def causal_mask(count: int, length: int, dtype: torch.dtype) -> Tensor:
    """For the last `count` of `length` tokens: minus infinity where a token may not attend."""
    mask = torch.full((count, length), float("-inf"), dtype=dtype)
    return mask.triu_(length - count + 1)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PolicyWeights(Protocol):
    """The weights of the policies, one per slot. Slot 0 is the base model."""

    slots: int
    adapts_experts: bool
    """Whether some adapter is on experts too."""

    def load(self, slot: int, folder: Path) -> Iterator[None]:
        """Load a policy into a slot, a piece per iteration; the model may run in between. Raises BadPolicy."""

    def model(self, slot: int) -> Decoder | None:
        """A slot's own weights; None if it computes with the base model's."""

    def adapt(self, spans: Sequence[tuple[int, int, int]]) -> Adapt | None: ...
    def factors(self, layer: int, projection: Projection) -> Factors:
        """The adapters of all slots."""


class StepLogits(NamedTuple):
    """The result of a step for the rows that draw."""

    logits: Tensor
    """[rows, vocabulary]"""
    drawn: Tensor | None = None
    """int32 [2, rows], where the device drew: the tokens, and the bits of their log-probs."""


class OnItsWay:
    """What CUDA has drawn, or will have drawn, on its way to the host, which need not wait for it yet."""

    def __init__(self, rows: StepLogits, params: Sequence[SamplingParams]) -> None:
        assert rows.drawn is not None
        self._params = params
        self._most = max(one.top_logprobs for one in params)
        parts = [rows.drawn]
        if self._most:
            values, ids = top_tokens(rows.logits.float(), self._most)
            parts += [ids.int().t(), values.view(torch.int32).t()]
        device = torch.cat(parts) if len(parts) > 1 else rows.drawn
        self._here = torch.empty(device.shape, dtype=torch.int32, pin_memory=True)
        self._here.copy_(device, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> Draws:
        self._arrived.synchronize()
        here = self._here.numpy()
        tokens, bits = here[:2]
        ids, values = here[2:].reshape(2, self._most, len(self._params))
        top = [
            tuple(zip(ids[: one.top_logprobs, row].tolist(), likely[: one.top_logprobs, row].tolist(), strict=True))
            for likely in [values.view(np.float32)]
            for row, one in enumerate(self._params)
        ]
        return Draws(tokens.tolist(), bits.view(np.float32).tolist(), top)


@dataclass(frozen=True, slots=True)
class RanStep:
    """A step that has run, or on CUDA is still running: the host may do other things before it draws.

    Once the next step has been started, only what the device drew by itself can still be had.
    """

    work: list[Work]
    drawing: list[Completion]
    """Whose next tokens are drawn, one per row."""
    uniforms: list[float]
    rows: StepLogits
    coming: OnItsWay | None
    """Set where the device drew."""

    def tokens(self) -> Tensor:
        """The tokens of all rows, none of which is constrained, on the device. The host does not wait for them."""
        if self.rows.drawn is not None:
            return self.rows.drawn[0]
        return torch.tensor(self.draw({}).tokens)

    @torch.inference_mode()
    def draw(self, masks: Mapping[int, NDArray[np.bool_]]) -> Draws:
        """Draw one token per row. `masks`: the tokens that are allowed in a row, for rows that are constrained."""
        params = [sequence.params for sequence in self.drawing]
        logits = self.rows.logits
        if self.coming is None:
            # Elsewhere than on CUDA the host draws, with the same operators on all devices.
            logits = logits if logits.is_cuda else logits.cpu()
            return draw(logits.float(), params, self.uniforms, masks)
        draws = self.coming.wait()
        if masks:
            rows = list(masks)
            others = draw(
                logits[rows].float(),
                [params[row] for row in rows],
                [self.uniforms[row] for row in rows],
                {i: masks[row] for i, row in enumerate(rows)},
            )
            for i, row in enumerate(rows):
                draws.tokens[row] = others.tokens[i]
                draws.logprobs[row] = others.logprobs[i]
                draws.top[row] = others.top[i]
        return draws


class Runner(ABC):
    """Runs the model with its policies."""

    wants_consecutive_pages = True
    """Whether attention is faster over a view of the cache."""

    def __init__(self, decoder: LanguageModel, policies: PolicyWeights) -> None:
        self.decoder = decoder
        self.policies = policies

    @torch.inference_mode()
    def run(self, work: list[Work], before: RanStep | None = None) -> RanStep:
        """Run a step, with its scoring. The rows that draw are in the order of `work`.

        `before`: the step that draws the tokens of this one, if they were not known when it was planned.
        """
        drawing = [item.sequence for item in work if item.draws]
        uniforms = [sequence.rng.random() for sequence in drawing]
        rows = self._run_parts(work, drawing, uniforms, None if before is None else before.tokens())
        coming = None if rows.drawn is None else OnItsWay(rows, [sequence.params for sequence in drawing])
        return RanStep(work, drawing, uniforms, rows, coming)

    def _run_parts(
        self, work: list[Work], drawing: list[Completion], uniforms: list[float], drawn: Tensor | None
    ) -> StepLogits:
        """Run the sequences that use the weights of one slot together."""
        parts: dict[int, list[Work]] = {}
        for item in work:
            slot = item.sequence.slot
            parts.setdefault(slot if self.policies.model(slot) else 0, []).append(item)
        if len(parts) == 1:
            ((slot, part),) = parts.items()
            return self._run(slot, part, uniforms, drawn)
        chosen = dict(zip(drawing, uniforms, strict=True))
        own = {slot: [item.sequence for item in part if item.draws] for slot, part in parts.items()}
        # A graph may write where another one left its results, so they are copied before the next part runs.
        results = [
            copied(self._run(slot, part, [chosen[one] for one in own[slot]], drawn)) for slot, part in parts.items()
        ]
        ran = [sequence for sequences in own.values() for sequence in sequences]
        return in_order(results, [ran.index(sequence) for sequence in drawing])

    @abstractmethod
    def _run(self, slot: int, work: Sequence[Work], uniforms: Sequence[float], drawn: Tensor | None) -> StepLogits:
        """Run the part of a step that uses the weights of one slot.

        The uniforms are those of the rows that draw. `drawn`: what the step before drew, if all of `work` is of tokens
        among these.
        """


def pieces(ids: list[int], *, halves: bool = True) -> list[Work]:
    """A text as two halves, or as a whole, and then its last tokens one by one."""
    nobody = Completion(0, 0, ids, SamplingParams(1), 0, 0, (0, 0))
    nobody.pages = list(range(pages_for(len(ids))))
    parts = [len(ids) // 2] if halves else []
    ends = [0, *parts, len(ids) - 4, *range(len(ids) - 3, len(ids) + 1)]
    return [Work(nobody, start, stop - start) for start, stop in pairwise(ends)]


class TorchRunner(Runner):
    """Runs every step with PyTorch alone."""

    def __init__(self, decoder: LanguageModel, cache: RowKVCache, policies: PolicyWeights) -> None:
        super().__init__(decoder, policies)
        self.cache = cache

    def _run(self, slot: int, work: Sequence[Work], uniforms: Sequence[float], drawn: Tensor | None) -> StepLogits:
        decoder = self.policies.model(slot) or self.decoder
        hidden = self.hidden(decoder, work, self.ids(work, drawn))
        return StepLogits(decoder.logits(hidden[read_scores(decoder, work, hidden)]))

    def ids(self, work: Sequence[Work], drawn: Tensor | None) -> Tensor:
        """The tokens of a step."""
        if drawn is None:
            return torch.tensor([token for w in work for token in w.sequence.tokens[w.start : w.stop]])
        return drawn[[w.drawn_by for w in work]]

    def in_pieces(self, ids: Tensor) -> Tensor:
        """Scores over the vocabulary after each token of a text that is read in pieces, as a long prompt and the
        tokens after it are."""
        parts = pieces(ids.tolist(), halves=self.decoder.mixes_sequences)
        return torch.cat([self.piece(part) for part in parts])

    def piece(self, item: Work) -> Tensor:
        """Scores over the vocabulary after each token of a piece."""
        return self.decoder.logits(self.hidden(self.decoder, [item], self.ids([item], None)))

    def hidden(self, decoder: LanguageModel, work: Sequence[Work], ids: Tensor) -> Tensor:
        """Final hidden states of the tokens of a step."""
        positions = torch.tensor([position for w in work for position in range(w.start, w.stop)])
        adapt = self.policies.adapt(adapter_spans(work))
        device = self.cache.device
        return decoder.forward(ids.to(device), positions.to(device), self.cache.attend(work), adapt)


class StateRunner(TorchRunner):
    """Runs one sequence after another, each with the state that Transformers keeps for it."""

    decoder: TransformersDecoder

    def __init__(self, decoder: TransformersDecoder, policies: PolicyWeights) -> None:
        Runner.__init__(self, decoder, policies)

    def hidden(self, decoder: LanguageModel, work: Sequence[Work], ids: Tensor) -> Tensor:
        parts = ids.to(decoder.embed.device).split_with_sizes([item.count for item in work])
        return torch.cat([self._advance(*pair) for pair in zip(work, parts, strict=True)])

    def _advance(self, item: Work, ids: Tensor) -> Tensor:
        sequence = item.sequence
        adapt = self.policies.adapt(adapter_spans([item]))
        hidden, sequence.state = self.decoder.advance(ids, sequence.state if item.start else None, adapt)
        return hidden


def copied(result: StepLogits) -> StepLogits:
    return StepLogits(result.logits.clone(), None if result.drawn is None else result.drawn.clone())


def in_order(results: Sequence[StepLogits], order: list[int]) -> StepLogits:
    """The results of several parts as one, with the rows in this order. The host does not wait for them."""
    logits = torch.cat([result.logits for result in results])
    drawn = [result.drawn for result in results if result.drawn is not None]
    rows = on_device(np.asarray(order, np.int64), logits.device)
    return StepLogits(logits.index_select(0, rows), torch.cat(drawn, dim=1).index_select(1, rows) if drawn else None)


def read_scores(decoder: LanguageModel, work: Sequence[Work], hidden: Tensor) -> list[int]:
    """Give scored sequences their hidden states; returns the places in the run from which tokens are drawn."""
    ends = []
    end = 0
    for item in work:
        end += item.count
        if item.draws:
            ends.append(end - 1)
        if item.sequence.scoring and item.scored:
            item.sequence.scoring.read(decoder, item.stop - item.scored, hidden[end - item.scored : end])
    return ends


def adapter_spans(work: Sequence[Work]) -> list[tuple[int, int, int]]:
    """(start, stop, slot) of the runs of tokens in a batch that use one adapter."""
    spans = []
    start = 0
    for slot, items in groupby(work, key=lambda w: w.sequence.slot):
        stop = start + sum(item.count for item in items)
        spans.append((start, stop, slot))
        start = stop
    return spans

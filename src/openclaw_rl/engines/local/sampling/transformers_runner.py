"""Runs the steps of Transformers' code on CUDA: those without prompts as captured graphs.

A step launches thousands of small kernels, which takes ten times as long as they run. A graph launches them at once.
A family whose code waits for the device cannot be captured; it is run kernel by kernel. So are steps with adapters on
experts: which rows they change is known on the device only.
"""

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.errors import TritonError

from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm
from openclaw_rl.engines.local.model.language_model import Attend
from openclaw_rl.engines.local.model.transformers_decoder import TransformersDecoder
from openclaw_rl.engines.local.sampling.cuda_runner import GraphKey, GraphRunner
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE
from openclaw_rl.engines.local.sampling.paged_attention import paged_decode
from openclaw_rl.engines.local.sampling.runner import (
    PolicyWeights,
    RowKVCache,
    StepLogits,
    TorchRunner,
    pieces,
    read_scores,
)
from openclaw_rl.engines.local.sampling.scheduler import Work

log = logging.getLogger(__name__)


class TransformersRunner(GraphRunner):
    """Runs a decoder that Transformers computes. The last page of the cache is for the rows that pad a graph."""

    decoder: TransformersDecoder

    def __init__(
        self,
        decoder: TransformersDecoder,
        cache: RowKVCache,
        policies: PolicyWeights,
        max_sequences: int,
        max_context: int,
    ) -> None:
        super().__init__(decoder, policies, max_sequences, max_context)
        self.cache = cache
        self.plain = TorchRunner(decoder, cache, policies)
        self.captures = True

    def warm_up(self) -> None:
        try:
            super().warm_up()
        except (RuntimeError, TritonError) as error:
            self.captures = False
            self.graphs.clear()
            reason = str(error).partition("\n")[0]
            log.info("Steps of this model are not captured as graphs, so they are slower: %s", reason)

    @torch.inference_mode()
    def in_pieces(self, ids: Tensor) -> Tensor:
        """As `TorchRunner` has it, with a graph for each single token."""
        parts = pieces(ids.tolist())
        return torch.cat([self._piece(part) for part in parts])

    def _piece(self, item: Work) -> Tensor:
        if item.count == 1 and self.captures:
            return self._run(0, [item], [0.0], None).logits.clone()
        return self.plain.piece(item)

    def _run(self, slot: int, work: Sequence[Work], uniforms: Sequence[float], drawn: Tensor | None) -> StepLogits:
        uncaptured = self.policies.adapts_experts and any(item.sequence.slot for item in work)
        if self.captures and not uncaptured:
            return super()._run(slot, work, uniforms, drawn)
        return self._computed(work, uniforms, drawn)

    def _run_prompts(self, slot: int, work: Sequence[Work], uniforms: Sequence[float]) -> StepLogits:
        return self._computed(work, uniforms, None)

    def _computed(self, work: Sequence[Work], uniforms: Sequence[float], drawn: Tensor | None) -> StepLogits:
        hidden = self.plain.hidden(self.decoder, work, self.plain.ids(work, drawn))
        return self._drawn(self.decoder.logits(hidden[read_scores(self.decoder, work, hidden)]), work, uniforms)

    def _forward(self, key: GraphKey) -> Callable[[], Tensor]:
        inputs, rows = self.inputs, slice(0, key.rows)
        adapters = self._adapters(key)
        project = None if adapters is None else adapters.project

        def forward() -> Tensor:
            attend = self._attend(inputs.slots[rows], inputs.table[rows], inputs.lengths[rows])
            ids, positions = inputs.ids[rows].long(), inputs.positions[rows].long()
            return self.decoder.logits(self.decoder.forward(ids, positions, attend, project=project))

        return forward

    def _attend(self, slots: Tensor, table: Tensor, lengths: Tensor) -> Attend:
        """Attention of one token for each row of the page table. All that varies is in tensors."""
        keys, values = self.cache.keys, self.cache.values
        width = keys.shape[-1]
        places = torch.where(slots < 0, keys.shape[1] - PAGE_SIZE, slots).long()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
            if k.shape[1] != keys.shape[2]:
                raise RuntimeError("its layers have different numbers of heads")
            scale = q.shape[-1] ** -0.5 if form.scale is None else form.scale
            keys[layer].index_copy_(0, places, padded(k, width))
            values[layer].index_copy_(0, places, padded(v, width))
            q = padded(q, width)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            k_pages, v_pages = (cache[layer].view(-1, PAGE_SIZE, *cache.shape[2:]) for cache in (keys, values))
            paged_decode(q, k_pages, v_pages, table, lengths, scale, out, form)
            return out[..., : v.shape[-1]].flatten(1)

        return attend


def padded(heads: Tensor, width: int) -> Tensor:
    """Heads of the size of the cache, where those of a layer are smaller."""
    return F.pad(heads, (0, width - heads.shape[-1])) if heads.shape[-1] < width else heads

"""Runs the steps of Transformers' code on CUDA: those without prompts as captured graphs.

A step launches thousands of small kernels, which takes ten times as long as they run. A graph launches them at once.
Norms are one kernel each. A family whose code waits for the device cannot be captured; it is run kernel by kernel.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openclaw_rl.engines.local.model import kernels
from openclaw_rl.engines.local.model.adapter_kernels import expand, shrink
from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm
from openclaw_rl.engines.local.model.language_model import Attend, Projection
from openclaw_rl.engines.local.model.transformers_decoder import TransformersDecoder
from openclaw_rl.engines.local.sampling.cuda_forward import StepAdapters
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
#: A norm is computed by our kernel if that differs by at most this share of the largest result.
MAX_NORM_ERROR = 0.02


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
        fuse_norms(decoder.model)

    def warm_up(self) -> None:
        try:
            super().warm_up()
        except RuntimeError as error:
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
        if self.captures:
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
        adapt = None if adapters is None else partial(add_adapters, adapters)

        def forward() -> Tensor:
            attend = self._attend(inputs.slots[rows], inputs.table[rows], inputs.lengths[rows])
            hidden = self.decoder.forward(inputs.ids[rows].long(), inputs.positions[rows].long(), attend, adapt)
            return self.decoder.logits(hidden)

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
            # The kernel takes dense heads.
            q = padded(q, width).contiguous()
            out = torch.empty_like(q)
            k_pages, v_pages = (cache[layer].view(-1, PAGE_SIZE, *cache.shape[2:]) for cache in (keys, values))
            paged_decode(q, k_pages, v_pages, table, lengths, scale, out, form)
            return out[..., : v.shape[-1]].flatten(1)

        return attend


def padded(heads: Tensor, width: int) -> Tensor:
    """Heads of the size of the cache, where those of a layer are smaller."""
    return F.pad(heads, (0, width - heads.shape[-1])) if heads.shape[-1] < width else heads


def add_adapters(adapters: StepAdapters, layer: int, projection: Projection, x: Tensor, y: Tensor) -> Tensor:
    """An `Adapt` whose rows have the adapters that tensors say."""
    factors = adapters.policies.factors(layer, projection)
    return expand(y, shrink(x, factors, adapters.tiles), factors, adapters.tiles)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> None:
    """Have our kernel compute the norms that are what it computes: times the weight, or times one plus the weight."""
    offsets: dict[type[nn.Module], float | None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        kind = type(module)
        if not kind.__name__.endswith("RMSNorm") or not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        if kind not in offsets:
            offsets[kind] = offset_of(module, weight)
        offset = offsets[kind]
        if offset is not None:
            gain = weight if not offset else weight.float() + offset
            setattr(module, "forward", partial(norm, gain, eps_of(module)))  # noqa: B010 - it is a method


def offset_of(module: nn.Module, weight: Tensor) -> float | None:
    """What a norm adds to its weight; None if it computes something else."""
    x = torch.randn(4, len(weight), dtype=weight.dtype, device=weight.device)
    wanted = module(x)
    for offset in (0.0, 1.0):
        error = (norm(weight.float() + offset, eps_of(module), x) - wanted).abs().max()
        if error <= MAX_NORM_ERROR * wanted.abs().max():
            return offset
    return None


def eps_of(module: nn.Module) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6)))


def norm(gain: Tensor, eps: float, x: Tensor) -> Tensor:
    return kernels.rms_norm(x.reshape(-1, x.shape[-1]), gain, eps).view(x.shape)

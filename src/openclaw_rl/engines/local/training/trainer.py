"""From training sequences to gradients: packed micro-batches through the decoder.

The model reads a sequence once, however many samples it holds. Sequences with a common beginning share its
computation, forward and backward. Logits are computed only for the spans' tokens, a few rows at a time. The activations
of only one micro-batch exist at any time.

A layer that keeps its activations for the backward pass is computed once. One that does not keeps only its input, and
is computed again in the backward pass: about a third more work for that layer. The memory that is free decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openclaw_rl.engines.base import PassResult, SpanLogprobs, StepStopped
from openclaw_rl.engines.local.model import ops
from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm
from openclaw_rl.engines.local.model.decoder import Decoder, Layer, Shape
from openclaw_rl.engines.local.model.experts import grouped
from openclaw_rl.engines.local.model.language_model import ExpertRows, LanguageModel, Projection, Sizes
from openclaw_rl.engines.local.model.placement import free_memory
from openclaw_rl.engines.local.model.transformers_decoder import TransformersDecoder
from openclaw_rl.engines.local.training.blocks import Angles, LowRank, PackedAttend, block, dropped, no_adapters
from openclaw_rl.engines.local.training.packed_attention import attention_by_segment, packed_attention
from openclaw_rl.engines.local.training.packing import MicroBatch, by_span, empty_batch, micro_batches, signals
from openclaw_rl.engines.local.training.ranks import OneRank, Ranks
from openclaw_rl.losses.logprobs import chunked_logprobs, rows_in_chunk
from openclaw_rl.losses.policy import Loss
from openclaw_rl.types import TrainingSequence

#: Of the free memory, what activations may take: gradients, logits and fragments need some too.
ACTIVATION_SHARE = 0.8
#: A layer's backward pass has about three times what the layer kept, at its peak.
WORKING_LAYERS = 3
#: Where autograd decides what is kept (if all weights are trained), it is about twice as much.
RECORDED_SHARE = 2
#: Tokens of a micro-batch on a CPU.
MICRO_BATCH_TOKENS = 4096
#: On a GPU so many tokens times the model's width keep it busy while the host prepares the next layer. More take more
#: memory and are hardly faster (docs/results/learning.md).
BUSY_NUMBERS, LEAST_TOKENS, MOST_TOKENS = 5 << 20, 2048, 6144


def usual_micro_batch(shape: Sizes, device: torch.device) -> int:
    """The tokens of a micro-batch where nobody said how many."""
    if device.type == "cpu":
        return MICRO_BATCH_TOKENS
    return min(MOST_TOKENS, max(LEAST_TOKENS, BUSY_NUMBERS // shape.hidden))


def recomputed_layers(shape: Sizes, tokens: int, itemsize: int, free: int, *, recorded: bool) -> int:
    """How many layers are computed twice, so that the activations of so many tokens fit into the free memory.

    `recorded`: whether autograd decides what is kept.
    """
    residual = tokens * itemsize * shape.hidden
    kept = tokens * itemsize * kept_numbers(shape) * (RECORDED_SHARE if recorded else 1)
    room = free * ACTIVATION_SHARE - shape.layers * residual - WORKING_LAYERS * kept
    return shape.layers - max(0, min(shape.layers, int(room // (kept - residual))))


def kept_numbers(shape: Sizes) -> int:
    """Numbers per token that a layer keeps: two residuals, the heads before and after rotation, attention, the gate."""
    heads = shape.q_size + 2 * shape.kv_size
    return 2 * shape.hidden + 2 * heads + shape.q_size + 2 * shape.intermediate


class DecoderInParts(Protocol):
    """A decoder of which each rank holds a part."""

    @property
    def shape(self) -> Sizes: ...
    @property
    def embed(self) -> Tensor: ...
    @property
    def activation_dtype(self) -> torch.dtype: ...
    @property
    def norm(self) -> Tensor: ...
    @property
    def bytes_when_whole(self) -> int:
        """Memory that a pass takes if all weights stay whole, with the gradients of this rank's part."""

    def begin_pass(self, stays_whole: bool) -> None:
        """Before a pass over some micro-batches: whether weights stay whole from their first use to its end."""

    def end_pass(self) -> None:
        """Leave each rank its part of the weights."""

    def run(self, compute: Callable[[Decoder], Tensor]) -> Tensor:
        """`compute` with the whole weights outside the layers."""


@dataclass(frozen=True, slots=True)
class TrainedAdapters:
    """Adds the adapters of a pass, with gradients."""

    layers: Sequence[Mapping[Projection, LowRank]]

    def has(self, layer: int, projection: Projection) -> bool:
        return projection in self.layers[layer]

    def __call__(
        self, layer: int, projection: Projection, x: Tensor, y: Tensor, rows: ExpertRows | None = None
    ) -> Tensor:
        adapter = self.layers[layer].get(projection)
        if adapter is None:
            return y
        if rows is None:
            return y + dropped(x, adapter) @ adapter.down.t() @ adapter.up
        inner = grouped(x, adapter.down, rows.ends, outputs_first=True)
        return y + grouped(inner, adapter.up, rows.ends, outputs_first=False)


class Policy(NamedTuple):
    """The weights of one forward pass."""

    decoder: LanguageModel | DecoderInParts
    adapters: list[dict[Projection, LowRank]]
    """For each layer."""


class TrainedWeights(Protocol):
    """The weights that a step changes: the factors of an adapter, or all weights of the model."""

    @property
    def dropout(self) -> float: ...
    def parameters(self) -> list[Tensor]: ...
    def policy(self, base: Any, dropout_seed: int | None = None) -> Policy:
        """For one forward and backward pass on the base weights; without a seed there is no dropout."""
        ...

    def decoder(self, base: Any) -> LanguageModel | DecoderInParts:
        """The model that `policy` computes with."""
        ...

    def complete(self) -> "TrainedWeights":
        """All of the weights, on the first rank. Each rank calls this."""
        ...

    def save(self, folder: Path, base_model: str) -> None:
        """Write the policy as a folder that other programs load."""
        ...


class Trainer:
    """Computes gradients of a policy loss for the trained weights. The caller steps the optimiser.

    - Several ranks share the micro-batches of a pass. Then every rank has the gradient and the result of all of them.
    - Sharded weights stay whole during a pass if they fit into the free memory of every rank together with all
      activations. Otherwise each layer is gathered for each use.
    """

    def __init__(
        self,
        decoder: LanguageModel | DecoderInParts,
        weights: TrainedWeights,
        loss: Loss,
        micro_batch_tokens: int | None = None,
        ranks: Ranks | None = None,
        free: Callable[[torch.device], int] = free_memory,
    ) -> None:
        """`micro_batch_tokens`: without it, what suits the model and its device.

        `free` returns the bytes that are free on a device. Layers that do not fit are computed twice.
        """
        self.decoder = decoder
        self.weights = weights
        self.loss = loss
        self.usual_micro_batch = micro_batch_tokens or usual_micro_batch(decoder.shape, decoder.embed.device)
        self.micro_batch_tokens = self.usual_micro_batch
        self.free = free
        self.ranks = ranks or OneRank()
        self.micro_batches_seen = 0
        self.may_stay_whole = True
        """Whether sharded weights may stay whole during a pass; not after memory has run out."""
        self.is_stopped = False
        """Whether to raise StepStopped before the next micro-batch."""

    def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        """Add the gradient of the batch's loss to the `.grad` of the trained weights."""
        batches = self._micro_batches(sequences)
        sums = torch.zeros(3, device=self._device)
        logprobs = self._no_logprobs(batches)
        first = self.micro_batches_seen

        def accumulate(number: int) -> None:
            # Dropout is the same on whichever rank a micro-batch is computed.
            self.micro_batches_seen = first + number
            batch_sums, batch_logprobs = self._accumulate(sequences, batches[number])
            sums.add_(batch_sums)
            logprobs[number].copy_(batch_logprobs)

        models = [self.weights.decoder(self.decoder), *([self.decoder] if self.loss.kl_coef else [])]
        self._share_out(batches, accumulate, self._accumulate_nothing, models)
        self.micro_batches_seen = first + len(batches)
        if batches:
            self.ranks.add_up([sums, *logprobs, *self._gradients()])
        loss, clipped, kl_base = sums.tolist()
        return PassResult(
            loss=loss,
            clipped=clipped,
            kl_base=kl_base,
            tokens=sum(len(batch.ids) for batch in batches),
            response_tokens=sum(len(batch.targets) for batch in batches),
            logprobs=in_order(sequences, batches, logprobs),
        )

    @torch.no_grad()
    def score(self, sequences: Sequence[TrainingSequence], base: bool = False) -> SpanLogprobs:
        """Log-probs of the spans' tokens under the policy or the base model. The spans need no signals for this."""
        batches = self._micro_batches(sequences)
        policy = self._base if base else self.weights.policy(self.decoder)
        logprobs = self._no_logprobs(batches)

        def take_part() -> None:
            self._logprobs(empty_batch(self._device), policy)

        def score(number: int) -> None:
            logprobs[number].copy_(self._logprobs(batches[number], policy)[:, 0])

        self._share_out(batches, score, take_part, [policy.decoder])
        self.ranks.add_up(logprobs)
        return in_order(sequences, batches, logprobs)

    def _micro_batches(self, sequences: Sequence[TrainingSequence]) -> list[MicroBatch]:
        apart = isinstance(self.decoder, LanguageModel) and not self.decoder.mixes_sequences
        return micro_batches(sequences, self.micro_batch_tokens, self._device, apart=apart)

    def _share_out(
        self,
        batches: Sequence[MicroBatch],
        compute: Callable[[int], None],
        take_part: Callable[[], None],
        models: Sequence[LanguageModel | DecoderInParts],
    ) -> None:
        """Compute the micro-batches of a pass, each on one rank. It uses these models."""
        sharded = {id(model): model for model in models if not isinstance(model, LanguageModel)}.values()
        if sharded and batches:
            stays_whole = self.ranks.all_agree(self._fit_whole(sharded, max(len(batch.ids) for batch in batches)))
            for model in sharded:
                model.begin_pass(stays_whole)
        self.ranks.share_out(len(batches), compute, take_part)
        for model in sharded:
            model.end_pass()

    def _fit_whole(self, models: Collection[DecoderInParts], tokens: int) -> bool:
        """Whether whole weights and the activations of so many tokens fit into the free memory of this rank."""
        if not self.may_stay_whole:
            return False
        free = self._free_here() - sum(model.bytes_when_whole for model in models)
        shape = self.decoder.shape
        itemsize = self.decoder.activation_dtype.itemsize
        recorded = any(model.norm.requires_grad for model in models) and torch.is_grad_enabled()
        return recomputed_layers(shape, tokens, itemsize, free, recorded=recorded) == 0

    def _no_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """For each target of each micro-batch a 0, which stays if another rank computes the micro-batch."""
        return [torch.zeros(len(batch.targets), device=self._device) for batch in batches]

    def _gradients(self) -> list[Tensor]:
        """The gradients of the trained weights; zeros on a rank that had no micro-batch."""
        for parameter in self.weights.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad for parameter in self.weights.parameters() if parameter.grad is not None]

    def _accumulate(self, sequences: Sequence[TrainingSequence], batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Forward and backward pass of one micro-batch: its (loss, clipped, KL from the base) and its log-probs."""
        targets = signals(sequences, batch)
        base = None
        if self.loss.kl_coef:
            with torch.no_grad():
                base = self._logprobs(batch, self._base)[:, 0]
        logprobs = self._logprobs(batch, self.weights.policy(self.decoder, self.micro_batches_seen))
        self.micro_batches_seen += 1
        if base is not None:
            # The policy did not choose a forced token: there its distance from the base model counts as 0.
            base = torch.where(targets.forced, logprobs[:, 0].detach(), base)
        old = targets.old_logprobs
        advantages = targets.advantages
        tokens = self.loss.per_token(logprobs[:, 0], old[:, 0], advantages[:, 0], base)
        alternatives = self.loss.over_alternatives(logprobs[:, 1:], old[:, 1:], advantages[:, 1:])
        loss = (targets.weights * (tokens.loss + alternatives)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sums = torch.stack([loss.detach(), tokens.clipped.sum(), tokens.kl_base.sum()])
        return sums, logprobs[:, 0].detach()

    def _accumulate_nothing(self) -> None:
        """Take part in a micro-batch of the other ranks: its gradient here is 0."""
        batch = empty_batch(self._device)
        if self.loss.kl_coef:
            with torch.no_grad():
                self._logprobs(batch, self._base)
        logprobs = self._logprobs(batch, self.weights.policy(self.decoder))
        (logprobs * 0).sum().backward()  # type: ignore[no-untyped-call]

    def _logprobs(self, batch: MicroBatch, policy: Policy) -> Tensor:
        """Log-probs of a micro-batch's targets, [targets, 1 + n]. Raises StepStopped."""
        if self.is_stopped:
            raise StepStopped("the step was stopped")
        decoder, adapters = policy
        if isinstance(decoder, TransformersDecoder):
            return self._forward_by_transformers(batch, decoder, adapters)
        if isinstance(decoder, Decoder):
            return self._forward(batch, decoder, adapters)
        assert not isinstance(decoder, LanguageModel)
        return decoder.run(lambda weights: self._forward(batch, weights, adapters))

    def _forward(self, batch: MicroBatch, decoder: Decoder, adapters: list[dict[Projection, LowRank]]) -> Tensor:
        shape = decoder.shape
        angles = decoder.angles(batch.positions)
        attend = packed_attention(batch.segments, self._device, decoder.activation_dtype)
        residual = ops.embedding(batch.ids, decoder.embed)
        recomputed = self._recomputed_layers(batch, decoder, recorded=decoder.norm.requires_grad)
        for i, (layer, adapter) in enumerate(zip(decoder.layers, adapters, strict=True)):
            rotation = angles if shape.rotary_layers[i] else None
            rows = batch.rows if i + 1 == shape.layers else None
            compute = partial(self._block, shape, adapter, rotation, attend, rows, i < recomputed)
            residual = compute(layer, residual) if isinstance(layer, Layer) else layer(compute, residual)
        hidden = ops.rms_norm(residual, decoder.norm, shape.eps)
        return chunked_logprobs(hidden, decoder.head, batch.targets)

    def _forward_by_transformers(
        self, batch: MicroBatch, decoder: TransformersDecoder, adapters: list[dict[Projection, LowRank]]
    ) -> Tensor:
        attend = attention_by_segment(batch.segments)

        def attend_layer(layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
            return attend(q, k, v, form)

        adapt = TrainedAdapters(adapters)
        recomputed = self._recomputed_layers(batch, decoder, recorded=True)
        hidden = decoder.forward(batch.ids, batch.positions, attend_layer, adapt, recomputed)
        hidden = hidden.index_select(0, batch.rows)
        return chunked_logprobs(hidden, decoder.logits, batch.targets, rows_in_chunk(decoder.shape.vocab))

    def _block(
        self,
        shape: Shape,
        adapters: dict[Projection, LowRank],
        angles: Angles | None,
        attend: PackedAttend,
        rows: Tensor | None,
        again: bool,
        layer: Layer,
        residual: Tensor,
    ) -> Tensor:
        """A layer; with `again` it is computed a second time in the backward pass."""
        args = (shape, layer, adapters, residual, angles, attend, rows)
        if not again:
            return block(*args)
        # Nothing here uses the global random generator, so there is no state to keep.
        result: Tensor = checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
        return result

    def _recomputed_layers(self, batch: MicroBatch, decoder: LanguageModel, *, recorded: bool) -> int:
        """The first layers are those: their activations would be kept the longest."""
        if not torch.is_grad_enabled():
            return 0
        itemsize = decoder.activation_dtype.itemsize
        return recomputed_layers(decoder.shape, len(batch.ids), itemsize, self._free_here(), recorded=recorded)

    def _free_here(self) -> int:
        """The free memory of this rank. Ranks on a CPU share its memory."""
        free = self.free(self._device)
        return free // self.ranks.on_this_machine if self._device.type == "cpu" else free

    @property
    def _device(self) -> torch.device:
        return self.decoder.embed.device

    @property
    def _base(self) -> Policy:
        return Policy(self.decoder, no_adapters(self.decoder.shape))


def in_order(
    sequences: Sequence[TrainingSequence], batches: Sequence[MicroBatch], values: Sequence[Tensor]
) -> SpanLogprobs:
    """One value per target of the micro-batches, arranged by sequence and span."""
    result: SpanLogprobs = [[] for _ in sequences]
    for batch, batch_values in zip(batches, values, strict=True):
        spans = [span for i in batch.indices for span in sequences[i].spans]
        span_values = iter(by_span(batch_values.tolist(), spans))
        for i in batch.indices:
            result[i] = [next(span_values) for _ in sequences[i].spans]
    return result

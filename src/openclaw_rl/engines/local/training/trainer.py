"""From training sequences to gradients: packed micro-batches through the decoder.

The model reads a sequence once, however many samples it holds. Sequences that begin alike share the computation of
their beginning, forward and backward. Logits are computed only for the spans' tokens, a few rows at a time. The
activations of only one micro-batch exist at any time.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from openclaw_rl.engines.base import PassResult, SpanLogprobs, StepStopped
from openclaw_rl.engines.local.model import ops
from openclaw_rl.engines.local.model.decoder import Decoder, Projection
from openclaw_rl.engines.local.training.blocks import LowRank, block, no_adapters
from openclaw_rl.engines.local.training.packed_attention import packed_attention
from openclaw_rl.engines.local.training.packing import MicroBatch, by_span, micro_batches, signals
from openclaw_rl.losses.logprobs import chunked_logprobs
from openclaw_rl.losses.policy import Loss
from openclaw_rl.types import TrainingSequence

#: Matrix products are no faster with more tokens, and a 4B model's activations already take 11 GiB.
MICRO_BATCH_TOKENS = 4096


class Policy(NamedTuple):
    """The weights of one forward pass."""

    decoder: Decoder
    adapters: list[dict[Projection, LowRank]]
    """For each layer."""


class TrainedWeights(Protocol):
    """The weights that a step changes: the factors of an adapter, or all weights of the model."""

    @property
    def dropout(self) -> float: ...
    def parameters(self) -> list[Tensor]: ...
    def policy(self, base: Decoder, dropout_seed: int | None = None) -> Policy:
        """For one forward and backward pass on the base weights; without a seed there is no dropout."""
        ...

    def save(self, folder: Path, base_model: str) -> None:
        """Write the policy as a folder that other programs load."""
        ...


class Trainer:
    """Computes gradients of a policy loss for the trained weights. The caller steps the optimiser."""

    def __init__(
        self,
        decoder: Decoder,
        weights: TrainedWeights,
        loss: Loss,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        checkpointing: bool = False,
    ) -> None:
        """With `checkpointing` a layer keeps only its input and is computed twice: slower, for very long sequences."""
        self.decoder, self.weights, self.loss = decoder, weights, loss
        self.micro_batch_tokens, self.checkpointing = micro_batch_tokens, checkpointing
        self.micro_batches_seen = 0
        self.is_stopped = False
        """Whether to raise StepStopped before the next micro-batch."""

    def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        """Add the gradient of the batch's loss to the `.grad` of the trained weights."""
        batches = micro_batches(sequences, self.micro_batch_tokens, self._device)
        sums, logprobs = torch.zeros(3, device=self._device), []
        for batch in batches:
            batch_sums, batch_logprobs = self._accumulate(sequences, batch)
            sums += batch_sums
            logprobs.append(batch_logprobs)
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
        batches = micro_batches(sequences, self.micro_batch_tokens, self._device)
        policy = self._base if base else self.weights.policy(self.decoder)
        return in_order(sequences, batches, [self._logprobs(batch, policy)[:, 0] for batch in batches])

    def _accumulate(self, sequences: Sequence[TrainingSequence], batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Forward and backward pass of one micro-batch: its (loss, clipped, KL from the base) and its log-probs."""
        targets = signals(sequences, batch)
        base = None
        if self.loss.kl_coef:
            with torch.no_grad():
                base = self._logprobs(batch, self._base)[:, 0]
        logprobs = self._logprobs(batch, self.weights.policy(self.decoder, self.micro_batches_seen))
        self.micro_batches_seen += 1
        old, advantages = targets.old_logprobs, targets.advantages
        tokens = self.loss.per_token(logprobs[:, 0], old[:, 0], advantages[:, 0], base)
        alternatives = self.loss.over_alternatives(logprobs[:, 1:], old[:, 1:], advantages[:, 1:])
        loss = (targets.weights * (tokens.loss + alternatives)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        sums = torch.stack([loss.detach(), tokens.clipped.sum(), tokens.kl_base.sum()])
        return sums, logprobs[:, 0].detach()

    def _logprobs(self, batch: MicroBatch, policy: Policy) -> Tensor:
        """Log-probs of a micro-batch's targets, [targets, 1 + n]. Raises StepStopped."""
        if self.is_stopped:
            raise StepStopped("the step was stopped")
        decoder, adapters = policy
        shape = decoder.shape
        angles = decoder.angles(batch.positions)
        attend = packed_attention(batch.segments, self._device, decoder.embed.dtype)
        residual = F.embedding(batch.ids, decoder.embed)
        for i, (layer, adapter) in enumerate(zip(decoder.layers, adapters, strict=True)):
            rotation = angles if shape.rotary_layers[i] else None
            rows = batch.rows if i + 1 == shape.layers else None
            residual = self._run(block, shape, layer, adapter, residual, rotation, attend, rows)
        hidden = ops.rms_norm(residual, decoder.norm, shape.eps)
        return chunked_logprobs(hidden, decoder.head, batch.targets)

    def _run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        if not self.checkpointing:
            return function(*args)
        # Nothing here uses the global random generator, so there is no state to keep.
        result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        return result

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

"""Training sequences as Tinker's data, and losses from the log-probs that the service returns.

A datum holds all tokens but the last, and the successor of each as its target. Tinker sums over tokens, so a token's
weight in the batch (mean over a sample's tokens, then over samples) is multiplied into its advantage, which scales the
loss.

Losses are computed in NumPy, because the server's process does not load PyTorch. `losses.policy` computes the same with
gradients.

The service has no loss over several tokens at each position, which top-k distillation needs. A first pass returns the
log-probs of all these tokens. The slopes of the loss are computed here. A second pass uses them as the weights of a
cross entropy, whose gradient is then the gradient of the loss. Targets are [length, 1 + n]: each token's successor and
n alternatives to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.types import MAX_LOG_RATIO, LossSettings, Span, TrainingSequence

Table = NDArray[np.float64]
CROSS_ENTROPY = "cross_entropy"


class BadOutput(ValueError):
    """The service's output does not fit its input."""


class NotFinite(ValueError):
    """The policy gives a token a log-prob that is not finite."""


def to_data(types: Any, sequences: Sequence[TrainingSequence], *, takes_means: bool = False) -> list[Any]:
    """One `Datum` per sequence; `types` is the SDK's module of types.

    A server that `takes_means` divides by the number of tokens; the data are multiplied by it to make up for that.
    """
    samples = sum(len(sequence.spans) for sequence in sequences)
    return [to_datum(types, s, samples, s.read_length * len(sequences) if takes_means else 1) for s in sequences]


def to_datum(types: Any, sequence: TrainingSequence, samples: int, factor: float = 1.0) -> Any:
    length = sequence.read_length
    logprobs = [0.0] * length
    advantages = [0.0] * length
    for span in sequence.spans:
        size = span.stop - span.start
        if not size == len(span.old_logprobs) == len(span.advantages):
            raise ValueError(f"turn {span.turn}: every token of a span needs one old log-prob and one advantage")
        logprobs[rows(span)] = span.old_logprobs
        weight = factor / (size * samples)
        advantages[rows(span)] = [weight * advantage for advantage in span.advantages]
    ids = list(sequence.ids)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:length]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=ids[1 : length + 1], dtype="int64", shape=[length]),
            "logprobs": types.TensorData(data=logprobs, dtype="float32", shape=[length]),
            "advantages": types.TensorData(data=advantages, dtype="float32", shape=[length]),
        },
    )


def read_tables(sequences: Sequence[TrainingSequence], output: Any) -> list[Table]:
    """The targets' log-probs in a `ForwardBackwardOutput`. Raises BadOutput and NotFinite."""
    outputs = list(output.loss_fn_outputs)
    wide = width(sequences)
    if len(outputs) != len(sequences):
        raise BadOutput(f"{len(outputs)} results for {len(sequences)} sequences")
    tables = []
    for sequence, result in zip(sequences, outputs, strict=True):
        values = list(result["logprobs"].data) if "logprobs" in result else []
        if len(values) != sequence.read_length * wide:
            raise BadOutput(f"{len(values)} log-probs for {sequence.read_length * wide} tokens")
        table = np.array([np.nan if value is None else value for value in values]).reshape(-1, wide)
        if not all(np.isfinite(table[rows(span)]).all() for span in sequence.spans):
            raise NotFinite("a log-prob is not finite")
        tables.append(table)
    return tables


def sampled(sequences: Sequence[TrainingSequence], tables: Sequence[Table]) -> SpanLogprobs:
    """The log-probs of the sampled tokens, by span."""
    return [[t[rows(span), 0].tolist() for span in s.spans] for s, t in zip(sequences, tables, strict=True)]


def width(sequences: Sequence[TrainingSequence]) -> int:
    """Width of the targets: 1, plus the largest number of alternatives that a span has."""
    spans = [span for sequence in sequences for span in sequence.spans]
    return 1 + max((span.alternatives.ids.shape[1] for span in spans if span.alternatives is not None), default=0)


def rows(span: Span) -> slice:
    """The positions that predict a span's tokens."""
    return slice(span.start - 1, span.stop - 1)


class Surrogate(NamedTuple):
    """The loss of each token; all arrays have the same shape."""

    loss: Table
    slope: Table
    """Derivative of the loss by the token's log-prob."""
    clipped: NDArray[np.bool_]
    """Whether the clip holds the token back."""


class Measured(NamedTuple):
    """A batch's loss, and the number of tokens that the clip held back."""

    loss: float
    clipped: int


def surrogate(settings: LossSettings, new: Any, old: Any, advantages: Any, kind: str = "") -> Surrogate:
    """The loss of tokens with these log-probs; `kind` replaces the settings' kind of loss, not their bounds."""
    new = np.asarray(new, np.float64)
    old = np.asarray(old, np.float64)
    advantages = np.asarray(advantages, np.float64)
    gap = new - old
    kind = kind or settings.kind
    ratio = np.exp(np.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low = 1 - settings.eps_clip
    high = 1 + settings.eps_clip_high
    free = -advantages * ratio
    moving = np.where(np.abs(gap) <= MAX_LOG_RATIO, free, 0.0)
    if kind == "importance_sampling":
        return Surrogate(free, moving, np.zeros(free.shape, bool))
    if kind == "cispo":
        slope = -advantages * np.minimum(ratio, high)
        return Surrogate(slope * new, slope, ratio > high)
    bounded = -advantages * np.clip(ratio, low, high)
    return Surrogate(np.maximum(free, bounded), np.where(bounded > free, 0.0, moving), bounded > free)


def measure(settings: LossSettings, sequences: Sequence[TrainingSequence], logprobs: SpanLogprobs) -> Measured:
    """The loss of a batch whose tokens have these log-probs under the policy: mean over tokens, then samples."""
    samples = sum(len(sequence.spans) for sequence in sequences)
    total = 0.0
    clipped = 0
    for sequence, spans in zip(sequences, logprobs, strict=True):
        for span, span_logprobs in zip(sequence.spans, spans, strict=True):
            losses = surrogate(settings, span_logprobs, span.old_logprobs, span.advantages)
            total += float(losses.loss.mean()) / samples
            clipped += int(losses.clipped.sum())
    return Measured(total, clipped)


def loss_config(settings: LossSettings) -> dict[str, float] | None:
    """The clip in the service's form: bounds of the ratio."""
    if settings.kind == "importance_sampling":
        return None
    low = 0.0 if settings.kind == "cispo" else 1 - settings.eps_clip
    return {"clip_low_threshold": low, "clip_high_threshold": 1 + settings.eps_clip_high}


class Slopes(NamedTuple):
    """A batch's loss, and its derivatives by the log-probs: one table per sequence."""

    loss: float
    tables: list[Table]


def is_weighted(sequences: Sequence[TrainingSequence]) -> bool:
    """Whether any span has alternatives to the sampled tokens."""
    return any(span.alternatives is not None for sequence in sequences for span in sequence.spans)


def to_weighted_data(
    types: Any, sequences: Sequence[TrainingSequence], slopes: Sequence[Table] | None = None, factor: bool = False
) -> list[Any]:
    """One `Datum` per sequence; without slopes it only asks for log-probs.

    `factor` is for a server that takes means where Tinker sums.
    """
    wide = width(sequences)
    data = []
    for place, sequence in enumerate(sequences):
        length = sequence.read_length
        weights = np.zeros((length, wide)) if slopes is None else -slopes[place]
        if factor:
            weights = weights * (length * len(sequences))
        shape = [length, wide]
        inputs = {
            "target_tokens": types.TensorData(data=targets(sequence, wide), dtype="int64", shape=shape),
            "weights": types.TensorData(data=weights.flatten().tolist(), dtype="float32", shape=shape),
        }
        ids = list(sequence.ids[:length])
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs))
    return data


def targets(sequence: TrainingSequence, wide: int) -> list[int]:
    length = sequence.read_length
    table = np.zeros((length, wide), dtype=np.int64)
    table[:, 0] = sequence.ids[1 : length + 1]
    for span in sequence.spans:
        if span.alternatives is not None:
            table[rows(span), 1 : 1 + span.alternatives.ids.shape[1]] = span.alternatives.ids
    ids: list[int] = table.flatten().tolist()
    return ids


def slopes_of(settings: LossSettings, sequences: Sequence[TrainingSequence], tables: Sequence[Table]) -> Slopes:
    """The loss of a batch whose targets have these log-probs, as `losses.policy` defines it."""
    samples = sum(len(sequence.spans) for sequence in sequences)
    total = 0.0
    all_slopes = []
    for sequence, table in zip(sequences, tables, strict=True):
        slopes = np.zeros_like(table)
        for span in sequence.spans:
            weight = 1 / ((span.stop - span.start) * samples)
            places = rows(span)
            losses = surrogate(settings, table[places, 0], span.old_logprobs, span.advantages)
            slopes[places, 0] = weight * losses.slope
            total += weight * float(losses.loss.sum())
            if (others := span.alternatives) is not None:
                columns = slice(1, 1 + others.ids.shape[1])
                losses = surrogate(settings, table[places, columns], others.old_logprobs, others.advantages, kind="ppo")
                slopes[places, columns] = weight * losses.slope
                total += weight * float(losses.loss.sum())
        all_slopes.append(slopes)
    return Slopes(total, all_slopes)

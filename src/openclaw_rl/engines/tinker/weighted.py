"""A loss over several tokens at each position (top-k distillation), which the service does not have.

A first pass returns the log-probs of all these tokens. The slopes of the loss are computed here. A second pass uses
them as the weights of a cross entropy, whose gradient is then the gradient of the loss. Targets are [length, 1 + n]:
each token's successor and n alternatives to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.engines.tinker.datum import BadOutput, NotFinite, read_length
from openclaw_rl.engines.tinker.surrogate import Table, surrogate
from openclaw_rl.types import LossSettings, Span, TrainingSequence

CROSS_ENTROPY = "cross_entropy"


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
        length = read_length(sequence)
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
    length = read_length(sequence)
    table = np.zeros((length, wide), dtype=np.int64)
    table[:, 0] = sequence.ids[1 : length + 1]
    for span in sequence.spans:
        if span.alternatives is not None:
            table[rows(span), 1 : 1 + span.alternatives.ids.shape[1]] = span.alternatives.ids
    ids: list[int] = table.flatten().tolist()
    return ids


def read_tables(sequences: Sequence[TrainingSequence], output: Any) -> list[Table]:
    """The targets' log-probs in a `ForwardBackwardOutput`. Raises BadOutput and NotFinite."""
    outputs, wide = list(output.loss_fn_outputs), width(sequences)
    if len(outputs) != len(sequences):
        raise BadOutput(f"{len(outputs)} results for {len(sequences)} sequences")
    tables = []
    for sequence, result in zip(sequences, outputs, strict=True):
        values = list(result["logprobs"].data) if "logprobs" in result else []
        if len(values) != read_length(sequence) * wide:
            raise BadOutput(f"{len(values)} log-probs for {read_length(sequence)} × {wide} tokens")
        table = np.array([np.nan if value is None else value for value in values]).reshape(-1, wide)
        if not all(np.isfinite(table[rows(span)]).all() for span in sequence.spans):
            raise NotFinite("a log-prob is not finite")
        tables.append(table)
    return tables


def sampled(sequences: Sequence[TrainingSequence], tables: Sequence[Table]) -> SpanLogprobs:
    """The log-probs of the sampled tokens, by span."""
    return [[t[rows(span), 0].tolist() for span in s.spans] for s, t in zip(sequences, tables, strict=True)]


def slopes_of(settings: LossSettings, sequences: Sequence[TrainingSequence], tables: Sequence[Table]) -> Slopes:
    """The loss of a batch whose targets have these log-probs, as `losses.policy` defines it."""
    samples = sum(len(sequence.spans) for sequence in sequences)
    total, all_slopes = 0.0, []
    for sequence, table in zip(sequences, tables, strict=True):
        slopes = np.zeros_like(table)
        for span in sequence.spans:
            weight, places = 1 / ((span.stop - span.start) * samples), rows(span)
            losses = surrogate(settings, table[places, 0], span.old_logprobs, span.advantages)
            slopes[places, 0] = weight * losses.slope
            total += weight * float(losses.loss.sum())
            if (others := span.alternatives) is not None:
                beside = slice(1, 1 + others.ids.shape[1])
                losses = surrogate(settings, table[places, beside], others.old_logprobs, others.advantages, kind="ppo")
                slopes[places, beside] = weight * losses.slope
                total += weight * float(losses.loss.sum())
        all_slopes.append(slopes)
    return Slopes(total, all_slopes)


def width(sequences: Sequence[TrainingSequence]) -> int:
    """Width of the targets: 1, plus the largest number of alternatives that a span has."""
    spans = [span for sequence in sequences for span in sequence.spans]
    return 1 + max((span.alternatives.ids.shape[1] for span in spans if span.alternatives is not None), default=0)


def rows(span: Span) -> slice:
    """The positions that predict a span's tokens."""
    return slice(span.start - 1, span.stop - 1)

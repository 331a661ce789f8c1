"""Converts training sequences to Tinker's data, and the service's output to log-probs.

A datum holds all tokens but the last, and the successor of each as its target. Tinker sums over tokens, so a token's
weight in the batch (mean over a sample's tokens, then over samples) is multiplied into its advantage, which scales the
loss.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.types import Span, TrainingSequence

Table = NDArray[np.float64]


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
    logprobs, advantages = [0.0] * length, [0.0] * length
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
    outputs, wide = list(output.loss_fn_outputs), width(sequences)
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

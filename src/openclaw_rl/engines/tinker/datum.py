"""Converts training sequences to Tinker's data, and the service's output to log-probs of the spans.

A datum holds all tokens but the last, and the successor of each as its target. Tinker sums over tokens, so a token's
weight in the batch (mean over a sample's tokens, then over samples) is multiplied into its advantage, which scales the
loss.
"""

import math
from collections.abc import Sequence
from typing import Any

from openclaw_rl.engines.base import SpanLogprobs
from openclaw_rl.types import TrainingSequence


class BadOutput(ValueError):
    """The service's output does not fit its input."""


class NotFinite(ValueError):
    """The policy gives a token a log-prob that is not finite."""


def to_data(types: Any, sequences: Sequence[TrainingSequence], *, takes_means: bool = False) -> list[Any]:
    """One `Datum` per sequence; `types` is the SDK's module of types.

    A server that `takes_means` divides by the number of tokens; the data are multiplied by it to make up for that.
    """
    samples = sum(len(sequence.spans) for sequence in sequences)
    return [to_datum(types, s, samples, read_length(s) * len(sequences) if takes_means else 1) for s in sequences]


def to_datum(types: Any, sequence: TrainingSequence, samples: int, factor: float = 1.0) -> Any:
    length = read_length(sequence)
    logprobs, advantages = [0.0] * length, [0.0] * length
    for span in sequence.spans:
        size = span.stop - span.start
        if not size == len(span.old_logprobs) == len(span.advantages):
            raise ValueError(f"turn {span.turn}: every token of a span needs one old log-prob and one advantage")
        # A span's first token is predicted by the token before it.
        logprobs[span.start - 1 : span.stop - 1] = span.old_logprobs
        weight = factor / (size * samples)
        advantages[span.start - 1 : span.stop - 1] = [weight * advantage for advantage in span.advantages]
    ids = list(sequence.ids)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:length]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=ids[1 : length + 1], dtype="int64", shape=[length]),
            "logprobs": types.TensorData(data=logprobs, dtype="float32", shape=[length]),
            "advantages": types.TensorData(data=advantages, dtype="float32", shape=[length]),
        },
    )


def read_length(sequence: TrainingSequence) -> int:
    """Number of tokens that the model has to read: the last token of the last span is only predicted."""
    return sequence.spans[-1].stop - 1


def span_logprobs(sequences: Sequence[TrainingSequence], output: Any) -> SpanLogprobs:
    """The spans' log-probs in a `ForwardBackwardOutput`. Raises BadOutput and NotFinite."""
    outputs = list(output.loss_fn_outputs)
    if len(outputs) != len(sequences):
        raise BadOutput(f"{len(outputs)} results for {len(sequences)} sequences")
    logprobs: SpanLogprobs = []
    for sequence, result in zip(sequences, outputs, strict=True):
        values = list(result["logprobs"].data) if "logprobs" in result else []
        if len(values) != read_length(sequence):
            raise BadOutput(f"{len(values)} log-probs for {read_length(sequence)} tokens")
        logprobs.append([values[span.start - 1 : span.stop - 1] for span in sequence.spans])
    if not all(value is not None and math.isfinite(value) for spans in logprobs for span in spans for value in span):
        raise NotFinite("a log-prob is not finite")
    return logprobs

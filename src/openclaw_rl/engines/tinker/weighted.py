"""A loss over several tokens at each position (top-k distillation), which the service does not have.

A first pass returns the log-probs of all these tokens. The slopes of the loss are computed here. A second pass uses
them as the weights of a cross entropy, whose gradient is then the gradient of the loss. Targets are [length, 1 + n]:
each token's successor and n alternatives to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from openclaw_rl.engines.tinker.datum import Table, rows, width
from openclaw_rl.engines.tinker.surrogate import surrogate
from openclaw_rl.types import LossSettings, TrainingSequence

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

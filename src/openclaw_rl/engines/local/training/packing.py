"""Packs sequences into micro-batches of bounded size, and builds the tensors of a micro-batch's forward pass."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.losses.policy import token_weight
from openclaw_rl.types import Span, TrainingSequence


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed into one run of tokens.

    The last token of a sequence's last span is left out: the model predicts it and does not have to read it.
    """

    indices: tuple[int, ...]
    """Indices of the sequences in the batch, in the order of the tensors."""
    lengths: tuple[int, ...]
    ids: Tensor
    positions: Tensor
    rows: Tensor
    """Positions in the run that predict the spans' tokens."""
    targets: Tensor
    """[targets, 1 + n]: the spans' tokens and n alternatives to each; padded with token 0."""


@dataclass(frozen=True, slots=True)
class TargetSignals:
    """The training signal of each of a micro-batch's `targets`."""

    old_logprobs: Tensor
    """[targets, 1 + n]."""
    advantages: Tensor
    """[targets, 1 + n]; 0 for padding."""
    weights: Tensor
    """[targets]: the weight of each token in the batch's loss."""


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of sequences by micro-batch: first fit, longest first. A longer sequence is alone in one."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fit = next((b for b, left in enumerate(room) if lengths[index] <= left), len(bins))
        if fit == len(bins):
            bins.append([])
            room.append(budget)
        bins[fit].append(index)
        room[fit] -= lengths[index]
    return bins


def micro_batches(sequences: Sequence[TrainingSequence], budget: int, device: torch.device) -> list[MicroBatch]:
    """A batch as micro-batches of at most `budget` tokens. Sequences without spans are left out."""
    for sequence in sequences:
        check_spans(sequence)
    with_spans = [i for i, sequence in enumerate(sequences) if sequence.spans]
    groups = pack([sequences[i].read_length for i in with_spans], budget)
    return [micro_batch(sequences, [with_spans[k] for k in group], device) for group in groups]


def micro_batch(sequences: Sequence[TrainingSequence], indices: Sequence[int], device: torch.device) -> MicroBatch:
    """The tensors of some of a batch's sequences."""
    chosen = [sequences[i] for i in indices]
    lengths = [sequence.read_length for sequence in chosen]
    starts = accumulate(lengths[:-1], initial=0)
    spans = [(at, sequence, span) for at, sequence in zip(starts, chosen, strict=True) for span in sequence.spans]
    return MicroBatch(
        indices=tuple(indices),
        lengths=tuple(lengths),
        ids=flat((s.ids[:length] for s, length in zip(chosen, lengths, strict=True)), torch.long, device),
        positions=flat(map(range, lengths), torch.long, device),
        rows=flat((range(at + span.start - 1, at + span.stop - 1) for at, _, span in spans), torch.long, device),
        targets=beside(
            (s.ids[span.start : span.stop] for _, s, span in spans),
            [others.ids if (others := span.alternatives) else None for _, _, span in spans],
            torch.long,
            device,
        ),
    )


def signals(sequences: Sequence[TrainingSequence], batch: MicroBatch) -> TargetSignals:
    """The signals of a micro-batch. Weights are those of the whole batch, so that gradients add up."""
    samples = sum(len(sequence.spans) for sequence in sequences)
    spans = [span for i in batch.indices for span in sequences[i].spans]
    for span in spans:
        check_signals(span)
    weights = ([token_weight(span.stop - span.start, samples)] * (span.stop - span.start) for span in spans)
    device = batch.ids.device
    return TargetSignals(
        old_logprobs=beside(
            (span.old_logprobs for span in spans),
            [others.old_logprobs if (others := span.alternatives) else None for span in spans],
            torch.float32,
            device,
        ),
        advantages=beside(
            (span.advantages for span in spans),
            [others.advantages if (others := span.alternatives) else None for span in spans],
            torch.float32,
            device,
        ),
        weights=flat(weights, torch.float32, device),
    )


def by_span(values: Sequence[float], spans: Sequence[Span]) -> list[list[float]]:
    """One list of values per span, from the values of all tokens."""
    stops = accumulate(span.stop - span.start for span in spans)
    return [list(values[stop - (span.stop - span.start) : stop]) for span, stop in zip(spans, stops, strict=True)]


def flat(parts: Iterable[Iterable[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(list(chain.from_iterable(parts)), dtype=dtype).to(device)


def beside(
    tokens: Iterable[Sequence[float]],
    alternatives: Sequence[NDArray[Any] | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A row for each token of the spans: its value and those of its alternatives, padded with 0."""
    width = max((table.shape[1] for table in alternatives if table is not None), default=0)
    parts = []
    for values, table in zip(tokens, alternatives, strict=True):
        part = torch.zeros(len(values), 1 + width, dtype=dtype)
        part[:, 0] = torch.tensor(values, dtype=dtype)
        if table is not None:
            part[:, 1 : 1 + table.shape[1]] = torch.from_numpy(np.array(table))
        parts.append(part)
    return torch.cat(parts).to(device)


def check_spans(sequence: TrainingSequence) -> None:
    """Raise ValueError unless the spans are in order and inside the tokens, each with a token before it."""
    end = 1
    for span in sequence.spans:
        if not end <= span.start < span.stop <= len(sequence.ids):
            raise ValueError(
                f"turn {span.turn}: a span from {span.start} to {span.stop} is empty, out of order or out of bounds"
            )
        end = span.stop


def check_signals(span: Span) -> None:
    """Raise ValueError unless every token has a signal: shifted signals would silently train the wrong tokens."""
    if not len(span.old_logprobs) == len(span.advantages) == span.stop - span.start:
        raise ValueError(f"turn {span.turn}: every token of a span needs one old log-prob and one advantage")
    if (others := span.alternatives) is None:
        return
    shapes = {table.shape for table in (others.ids, others.old_logprobs, others.advantages)}
    if len(shapes) > 1 or len(others.ids) != span.stop - span.start:
        raise ValueError(f"turn {span.turn}: every alternative needs a token, one old log-prob and one advantage")

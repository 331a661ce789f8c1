"""Packs sequences into micro-batches of bounded size, and builds the tensors of a micro-batch's forward pass.

Sequences with a common beginning are a tree of segments, so that the model reads what they have in common once. The
tree may have any depth. Attempts of a group need only a prompt and its branches, but attempts of several turns share a
first turn and part later, and groups share a system prompt with its tools. A tree costs no more code than one level:
sorted sequences are a walk through it, in which each sequence adds the tokens after those that it shares with the
sequence before it.

What is shared is found by comparing token ids. So answers to one prompt, attempts of a group and turns of a session
that were stored apart are all the same case. The result depends only on the sequences and their order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.losses.policy import token_weight
from openclaw_rl.types import Span, TrainingSequence

#: A shorter common beginning is read once for each sequence: another call of attention in each layer costs more.
MIN_SHARED_TOKENS = 64


class Segment(NamedTuple):
    """The tokens [start, stop) of a run. They attend to each other causally, and to the segments that reach them."""

    start: int
    stop: int
    reach: int
    """The tokens [stop, reach) belong to sequences that contain this segment: they attend to all of it."""


@dataclass(slots=True)
class Tree:
    """Sequences as one run of tokens."""

    segments: list[Segment] = field(default_factory=list)
    """In order, without gaps."""
    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """The position of each token in its sequences."""
    places: list[NDArray[np.int64]] = field(default_factory=list)
    """For each sequence, where its tokens are in the run."""


class _Open(NamedTuple):
    """A segment of the sequence that was added last."""

    start: int
    position: int
    length: int


def shared_lengths(sequences: Sequence[Sequence[int]]) -> list[int]:
    """For each of sorted sequences, how many tokens it shares with the one before it in the tree.

    Sequences part where the first of them does, unless at least `MIN_SHARED_TOKENS` more are common to some of them.
    """
    common = [0, *(common_length(*pair) for pair in pairwise(map(np.asarray, sequences)))]
    shared = [0] * len(sequences)
    pending = [(1, len(sequences), 0)]
    while pending:
        start, stop, depth = pending.pop()
        for first, end in runs([length >= depth + MIN_SHARED_TOKENS for length in common[start:stop]], start):
            deeper = min(common[first:end])
            shared[first:end] = [deeper] * (end - first)
            pending.append((first, end, deeper))
    return shared


def runs(flags: Sequence[bool], offset: int) -> list[tuple[int, int]]:
    """The bounds of the longest runs of true values, counted from `offset`."""
    edges = np.flatnonzero(np.diff(np.array([False, *flags, False], dtype=np.int8))) + offset
    return [(int(start), int(stop)) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def common_length(one: NDArray[Any], other: NDArray[Any]) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def grow(sequences: Sequence[Sequence[int]], shared: Sequence[int]) -> Tree:
    """The tree of sequences, each of which shares that many of its first tokens with the one before it."""
    tree = Tree()
    path = list[_Open]()
    for sequence, common in zip(sequences, shared, strict=True):
        close(tree, path, common)
        if common < len(sequence):
            path.append(_Open(len(tree.ids), common, len(sequence) - common))
            tree.ids += sequence[common:]
            tree.positions += range(common, len(sequence))
        tree.places.append(np.concatenate([np.arange(part.start, part.start + part.length) for part in path]))
    close(tree, path, 0)
    tree.segments.sort()
    return tree


def close(tree: Tree, path: list[_Open], position: int) -> None:
    """End the segments of the path at this position: no later token attends to what comes after it."""
    while path and path[-1].position + path[-1].length > position:
        start, first, length = path.pop()
        kept = max(0, position - first)
        if kept:
            path.append(_Open(start, first, kept))
        tree.segments.append(Segment(start + kept, start + length, len(tree.ids)))


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed into one run of tokens. Sequences with a common beginning share its tokens.

    The last token of a sequence's last span is left out: the model predicts it and does not have to read it.
    """

    indices: tuple[int, ...]
    """Indices of the sequences in the batch, in the order of the targets."""
    segments: tuple[Segment, ...]
    """Of the run, in order."""
    ids: Tensor
    positions: Tensor
    rows: Tensor
    """The places in the run that predict the spans' tokens. Sequences that part after a place share it."""
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
    forced: Tensor
    """[targets]: whether a constraint forced the token."""


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of lengths by micro-batch: first fit, longest first. What is longer than the budget is alone in one."""
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


def micro_batches(
    sequences: Sequence[TrainingSequence], budget: int, device: torch.device, *, apart: bool = False
) -> list[MicroBatch]:
    """A batch as micro-batches of at most `budget` tokens and targets. Sequences without spans are left out.

    `apart`: each sequence is alone in one. Otherwise:

    - A sequence that is longer is alone in a micro-batch, or with sequences that have its beginning.
    - Sequences with a common beginning are in one micro-batch, where their common tokens are read once. If they do not
      fit into one, each of their micro-batches has the common tokens.
    - The tokens that they do not share may take half the budget, also if this exceeds it. Otherwise nothing would be
      shared where prompts are long. With a budget of 1, no sequence adds a token to another's micro-batch.
    - Targets exceed the budget only up to the length of the longest sequence: copies of it add targets, but no tokens.
    - The micro-batches depend only on the sequences and their order.
    """
    for sequence in sequences:
        check_spans(sequence)
    found = group_by_beginning(sequences)
    if apart:
        families = [[member._replace(shared=0, added=member.length)] for family in found for member in family]
        groups = [[k] for k in range(len(families))]
    else:
        families = [part for family in found for part in cut(family, budget)]
        families.sort(key=lambda family: min(member.sequence for member in family))
        groups = pack([max(tokens(family), targets(family)) for family in families], budget)
    return [micro_batch(sequences, [member for k in group for member in families[k]], device) for group in groups]


def empty_batch(device: torch.device) -> MicroBatch:
    """A micro-batch of no sequence, as short as a pass allows."""
    nothing = torch.zeros(1, dtype=torch.long, device=device)
    return MicroBatch((), (Segment(0, 1, 1),), nothing, nothing, nothing, nothing[:, None])


class Member(NamedTuple):
    """A sequence among others with the same beginning."""

    sequence: int
    """Its index in the batch."""
    shared: int
    """How many tokens it shares with the sequence before it."""
    added: int
    """How many tokens it adds."""
    targets: int
    """How many tokens its spans have."""

    @property
    def length(self) -> int:
        return self.shared + self.added


def tokens(members: Iterable[Member]) -> int:
    return sum(member.added for member in members)


def targets(members: Iterable[Member]) -> int:
    return sum(member.targets for member in members)


def group_by_beginning(sequences: Sequence[TrainingSequence]) -> list[list[Member]]:
    """The sequences that have spans, by their beginnings."""
    read = {i: list(one.ids[: one.read_length]) for i, one in enumerate(sequences) if one.spans}
    indices = sorted(read, key=lambda i: (read[i], i))
    families: list[list[Member]] = []
    for i, shared in zip(indices, shared_lengths([read[i] for i in indices]), strict=True):
        if not shared:
            families.append([])
        span_tokens = sum(span.stop - span.start for span in sequences[i].spans)
        families[-1].append(Member(i, shared, len(read[i]) - shared, span_tokens))
    return families


def cut(family: Sequence[Member], budget: int) -> Iterator[list[Member]]:
    """A family in parts that fit into a micro-batch. Each part has all tokens of its first member."""
    part: list[Member] = []
    for member in family:
        longer = [*part, member]
        most_tokens = max(budget, budget // 2 + max(other.shared for other in longer))
        most_targets = max(budget, *(other.length for other in longer))
        if part and (tokens(longer) > most_tokens or targets(longer) > most_targets):
            yield part
            part = []
        part.append(member if part else member._replace(shared=0, added=member.length))
    yield part


def micro_batch(sequences: Sequence[TrainingSequence], members: Sequence[Member], device: torch.device) -> MicroBatch:
    """The tensors of some of a batch's sequences."""
    chosen = [sequences[member.sequence] for member in members]
    tree = grow([list(one.ids[: one.read_length]) for one in chosen], [member.shared for member in members])
    spans = [(at, sequence, span) for at, sequence in zip(tree.places, chosen, strict=True) for span in sequence.spans]
    return MicroBatch(
        indices=tuple(member.sequence for member in members),
        segments=tuple(tree.segments),
        ids=copied(torch.tensor(tree.ids), device),
        positions=copied(torch.tensor(tree.positions), device),
        rows=copied(torch.from_numpy(np.concatenate([at[s.start - 1 : s.stop - 1] for at, _, s in spans])), device),
        targets=with_alternatives(
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
        old_logprobs=with_alternatives(
            (span.old_logprobs for span in spans),
            [others.old_logprobs if (others := span.alternatives) else None for span in spans],
            torch.float32,
            device,
        ),
        advantages=with_alternatives(
            (span.advantages for span in spans),
            [others.advantages if (others := span.alternatives) else None for span in spans],
            torch.float32,
            device,
        ),
        weights=flat(weights, torch.float32, device),
        forced=flat((span.forced or [False] * (span.stop - span.start) for span in spans), torch.bool, device),
    )


def by_span(values: Sequence[float], spans: Sequence[Span]) -> list[list[float]]:
    """One list of values per span, from the values of all tokens."""
    stops = accumulate(span.stop - span.start for span in spans)
    return [list(values[stop - (span.stop - span.start) : stop]) for span, stop in zip(spans, stops, strict=True)]


def flat(parts: Iterable[Iterable[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return copied(torch.tensor(list(chain.from_iterable(parts)), dtype=dtype), device)


def with_alternatives(
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
    return copied(torch.cat(parts), device)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device. The host does not wait for it, so that it stays ahead of a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


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
    if len(span.forced) not in (0, span.stop - span.start):
        raise ValueError(f"turn {span.turn}: it must be known of every token of a span whether it was forced")
    if (others := span.alternatives) is None:
        return
    shapes = {table.shape for table in (others.ids, others.old_logprobs, others.advantages)}
    if len(shapes) > 1 or len(others.ids) != span.stop - span.start:
        raise ValueError(f"turn {span.turn}: every alternative needs a token, one old log-prob and one advantage")

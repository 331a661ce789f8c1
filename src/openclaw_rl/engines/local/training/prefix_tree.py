"""Sequences that begin alike as a tree of segments, so that the model reads what they have in common once.

The tree may have any depth. Attempts of a group need only a prompt and its branches, but attempts of several turns
share a first turn and part later, and groups share a system prompt with its tools. A tree costs no more code than one
level: sorted sequences are a walk through it, in which each sequence adds the tokens after those that it shares with
the sequence before it.

What is shared is found by comparing token ids. So answers to one prompt, attempts of a group and turns of a session
that were stored apart are all the same case. The result depends only on the sequences and their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    tree, path = Tree(), list[_Open]()
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

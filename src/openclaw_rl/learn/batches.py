"""Judged turns as training sequences: those that extend each other go through the model once, together."""

from collections.abc import Sequence

import numpy as np

from openclaw_rl.learn.errors import NoSignal
from openclaw_rl.learn.methods import Baseline, Weights, alternatives, batch_baseline, lesson
from openclaw_rl.types import Span, StoredTurn, TrainingSequence

#: At most so much is left of signals that are equal, by rounding. The optimiser would make a whole step of it.
ROUNDING = 1e-9


def to_sequences(turns: Sequence[StoredTurn], weights: Weights) -> list[TrainingSequence]:
    """A batch as few sequences: a turn whose very tokens begin another's is a span of that one. Raises NoSignal."""
    baseline = batch_baseline(turns, weights)
    spans = {turn.number: to_span(turn, weights, baseline) for turn in turns}
    if weights.centred and not any(map(teaches, spans.values())):
        raise NoSignal("its whole batch was judged alike (--baseline batch)")
    longest_first = sorted(turns, key=lambda turn: (-length(turn), turn.number))
    groups: list[tuple[list[int], list[Span]]] = []
    for turn in longest_first:
        ids, span = [*turn.prompt_ids, *turn.response_ids], spans[turn.number]
        host = next((own for whole, own in groups if whole[: len(ids)] == ids and free(own, span)), None)
        if host is None:
            groups.append((ids, [span]))
        else:
            host.append(span)
    return [TrainingSequence(ids, sorted(own, key=lambda span: span.start)) for ids, own in groups]


def to_span(turn: StoredTurn, weights: Weights, baseline: Baseline) -> Span:
    start = len(turn.prompt_ids)
    own = lesson(turn, weights, baseline)
    others = alternatives(own.distilled, weights, baseline) if own.distilled else None
    return Span(turn.number, start, start + len(turn.response_ids), turn.logprobs, own.advantages, others)


def teaches(span: Span) -> bool:
    """Whether anything in it has a slope."""
    others = 0.0 if span.alternatives is None else float(np.abs(span.alternatives.advantages).max(initial=0.0))
    return others > ROUNDING or any(abs(advantage) > ROUNDING for advantage in span.advantages)


def free(taken: Sequence[Span], span: Span) -> bool:
    """Whether no other sample has these tokens: of two equal answers to one prompt, each has a sequence of its own."""
    return all(span.stop <= other.start or other.stop <= span.start for other in taken)


def length(turn: StoredTurn) -> int:
    return len(turn.prompt_ids) + len(turn.response_ids)

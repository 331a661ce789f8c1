"""Judged turns as training sequences: those that extend each other go through the model once, together."""

from collections.abc import Sequence

import numpy as np

from openclaw_rl.methods.base import Baseline, Method, NoSignal
from openclaw_rl.types import Span, StoredTurn, TrainingSequence

#: Equal signals can differ by this much through rounding. AdamW would make a full step of such a difference.
MAX_ROUNDING = 1e-9


def to_sequences(turns: Sequence[StoredTurn], method: Method) -> list[TrainingSequence]:
    """A batch as few sequences: a turn whose tokens begin another turn is a span of that one. Raises NoSignal."""
    baseline = method.baseline(turns)
    spans = {turn.number: to_span(turn, method, baseline) for turn in turns}
    if method.centred and not any(map(teaches, spans.values())):
        raise NoSignal("all signals of its batch are equal (--baseline batch)")
    longest_first = sorted(turns, key=lambda turn: (-length(turn), turn.number))
    groups: list[tuple[list[int], list[Span]]] = []
    for turn in longest_first:
        ids, span = [*turn.prompt_ids, *turn.response_ids], spans[turn.number]
        host = next((taken for whole, taken in groups if whole[: len(ids)] == ids and free(taken, span)), None)
        if host is None:
            groups.append((ids, [span]))
        else:
            host.append(span)
    return [TrainingSequence(ids, sorted(taken, key=lambda span: span.start)) for ids, taken in groups]


def to_span(turn: StoredTurn, method: Method, baseline: Baseline) -> Span:
    start = len(turn.prompt_ids)
    lesson = method.lesson(turn, baseline)
    stop = start + len(turn.response_ids)
    return Span(turn.number, start, stop, turn.logprobs, lesson.advantages, lesson.alternatives)


def teaches(span: Span) -> bool:
    """Whether anything in it has a gradient."""
    others = 0.0 if span.alternatives is None else float(np.abs(span.alternatives.advantages).max(initial=0.0))
    return others > MAX_ROUNDING or any(abs(advantage) > MAX_ROUNDING for advantage in span.advantages)


def free(taken: Sequence[Span], span: Span) -> bool:
    """Whether no other sample has these tokens. Two equal answers to one prompt need a sequence each."""
    return all(span.stop <= other.start or other.stop <= span.start for other in taken)


def length(turn: StoredTurn) -> int:
    return len(turn.prompt_ids) + len(turn.response_ids)

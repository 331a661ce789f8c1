"""Turns judged turns into training sequences. Turns that extend each other share a sequence.

Other common beginnings, like the prompt of a group's attempts, are the engine's matter: the local learner reads them
once.
"""

from collections.abc import Sequence

import numpy as np

from openclaw_rl.methods.base import Baseline, Method, NoSignal
from openclaw_rl.types import Span, StoredTurn, TrainingSequence

#: Equal signals can differ by this much through rounding. AdamW would turn such a difference into a full step.
MAX_ROUNDING = 1e-9


def to_sequences(turns: Sequence[StoredTurn], method: Method) -> list[TrainingSequence]:
    """Pack a batch into few sequences: a turn that is a prefix of another becomes a span of it. Raises NoSignal."""
    baseline = method.baseline(turns)
    spans = {turn.number: to_span(turn, method, baseline) for turn in turns}
    if method.centred and not any(map(teaches, spans.values())):
        raise NoSignal("all signals of its batch are equal (--baseline batch)")
    longest_first = sorted(turns, key=lambda turn: (-length(turn), turn.number))
    groups: list[tuple[list[int], list[Span]]] = []
    for turn in longest_first:
        ids = [*turn.prompt_ids, *turn.response_ids]
        span = spans[turn.number]
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
    """Whether any token of the span has a gradient."""
    others = 0.0 if span.alternatives is None else float(np.abs(span.alternatives.advantages).max(initial=0.0))
    return others > MAX_ROUNDING or any(abs(advantage) > MAX_ROUNDING for advantage in span.advantages)


def free(taken: Sequence[Span], span: Span) -> bool:
    """Whether no other span overlaps this one. Two equal answers to one prompt need a sequence each."""
    return all(span.stop <= other.start or other.stop <= span.start for other in taken)


def length(turn: StoredTurn) -> int:
    return len(turn.prompt_ids) + len(turn.response_ids)

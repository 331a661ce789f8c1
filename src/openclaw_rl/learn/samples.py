"""From judged turns to training sequences: turns with a signal, packed, and log-probs for turns that were imported.

Turns that extend each other share a sequence. Other common beginnings, like the prompt of a group's attempts, are the
engine's matter: the local learner reads them once.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from openclaw_rl.aio import wait_at_most
from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler
from openclaw_rl.ledger.errors import DamagedTurn, LedgerError, UnknownTurn
from openclaw_rl.ledger.groups import queue, trainable
from openclaw_rl.ledger.sessions import drop_damaged, move
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import first_unscored, load_turn, set_logprobs
from openclaw_rl.methods.base import Baseline, Lesson, Method, NoSignal
from openclaw_rl.types import ScoreRequest, Span, State, StoredTurn, TrainingSequence

log = logging.getLogger(__name__)

#: Equal signals can differ by this much through rounding. AdamW would turn such a difference into a full step.
MAX_ROUNDING = 1e-9


async def load_with_signal(
    ledger: Ledger, method: Method, numbers: Sequence[int], check: Callable[[Lesson], None] = lambda _lesson: None
) -> list[StoredTurn]:
    """Load the turns that the method can learn from, and drop the others, damaged ones too, with the reason.

    `check` raises NoSignal for a lesson that the trainer cannot use. Turns that have just been deleted are left out.
    """
    # In a thread: groups make large batches, and the server must answer meanwhile.
    turns, unusable = await asyncio.to_thread(_load, ledger, method, numbers, check)
    for number, error in unusable:
        if isinstance(error, DamagedTurn):
            log.warning("It is not trained on: %s.", error)
            await ledger.write(drop_damaged, error)
            continue
        with contextlib.suppress(UnknownTurn):
            await drop_without_signal(ledger, number, error)
    return turns


async def drop_without_signal(ledger: Ledger, number: int, error: NoSignal) -> None:
    """Raises UnknownTurn."""
    await ledger.write(move, number, State.DROPPED, f"no signal: {error}")


def _load(
    ledger: Ledger, method: Method, numbers: Sequence[int], check: Callable[[Lesson], None]
) -> tuple[list[StoredTurn], list[tuple[int, NoSignal | DamagedTurn]]]:
    """The turns that can be trained on, and why others cannot."""
    turns: list[StoredTurn] = []
    unusable: list[tuple[int, NoSignal | DamagedTurn]] = []
    for number in numbers:
        try:
            turn = method.prepared(ledger.read(load_turn, number))
            check(method.lesson(turn))
            turns.append(turn)
        except UnknownTurn:
            continue
        except (NoSignal, DamagedTurn) as error:
            unusable.append((number, error))
    return turns, unusable


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
    return Span(turn.number, start, stop, turn.logprobs, lesson.advantages, lesson.alternatives, turn.forced)


def teaches(span: Span) -> bool:
    """Whether any token of the span has a gradient."""
    others = 0.0 if span.alternatives is None else float(np.abs(span.alternatives.advantages).max(initial=0.0))
    return others > MAX_ROUNDING or any(abs(advantage) > MAX_ROUNDING for advantage in span.advantages)


def free(taken: Sequence[Span], span: Span) -> bool:
    """Whether no other span overlaps this one. Two equal answers to one prompt need a sequence each."""
    return all(span.stop <= other.start or other.stop <= span.start for other in taken)


def length(turn: StoredTurn) -> int:
    return len(turn.prompt_ids) + len(turn.response_ids)


async def score_imported(
    ledger: Ledger,
    sampler: Sampler,
    batch_size: int,
    top: int = 0,
    *,
    poll_seconds: float = 5.0,
    line: str | None = None,
) -> None:
    """Score imported turns until cancelled, and record the policy's `top` likeliest tokens with them.

    They were not sampled here, so the current policy scores them. A first step on them starts at a ratio of one.

    A turn is scored only while fewer than `batch_size` turns wait to be judged or trained on. Otherwise a large file
    would be scored at once, and most of its turns would be stale before their step. Where people have lines of their
    own, only turns of the `line` that imported ones teach count as waiting for a step.

    Another process imports turns, so this one polls for them.
    """
    with ledger.watch() as changed:
        while True:
            changed.clear()
            try:
                turn = ledger.read(first_unscored)
                if turn is not None and ledger.read(queue).to_judge + ledger.read(trainable, line) < batch_size:
                    await score_turn(ledger, sampler, turn, top)
                    continue
            except (EngineUnavailable, LedgerError) as error:
                log.debug("Imported turns wait: %s", error)
                await asyncio.sleep(poll_seconds)
            await wait_at_most(poll_seconds, changed.wait())


async def score_turn(ledger: Ledger, sampler: Sampler, number: int, top: int) -> None:
    version = sampler.newest_version
    with contextlib.suppress(UnknownTurn):
        try:
            turn = ledger.read(load_turn, number)
        except DamagedTurn as error:
            log.warning("It is not trained on: %s.", error)
            await ledger.write(drop_damaged, error)
            return
        ids = [*turn.prompt_ids, *turn.response_ids]
        request = ScoreRequest(ids, len(turn.response_ids), version=version, top_k=top, owner=turn.session.owner)
        try:
            scores = await sampler.score(request)
        except EngineUnavailable:
            raise
        except EngineError as error:
            await ledger.write(move, number, State.DROPPED, f"cannot be scored by the policy: {error}")
        else:
            # A teacher that was asked about the policy's likeliest tokens has to be asked again about the new ones.
            await ledger.write(set_logprobs, number, version, scores, keep_verdict=not top)

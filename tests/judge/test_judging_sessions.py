"""What is seen only in many verdicts: sessions without a good turn, and judges that always say the same."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from openclaw_rl.judge.judges.base import Case, Opinion
from openclaw_rl.ledger import sessions
from openclaw_rl.ledger.status import read_status
from openclaw_rl.ledger.verdicts import COLLAPSE_WINDOW
from openclaw_rl.types import SessionKey, Vote
from support.judging import (
    ScriptedJudge,
    all_judged,
    judging,
    ready,
    score,
    until,
)
from support.records import Book


def voting(book: Book, values: dict[int, float]) -> ScriptedJudge:
    return ScriptedJudge(lambda case: Opinion(values[case.turn], (), (Vote("score", values[case.turn]),)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [({"method": "rl"}, True), ({"method": "opd", "eval_mode": True}, False), ({"method": "combine"}, False)],
)
async def test_with_scores_alone_a_session_that_ends_without_a_good_turn_gets_one(
    book: Book, options: dict[str, Any], chosen: bool
) -> None:
    turns = ready(book, 3)
    judge = voting(book, dict(zip(turns, (-1, 0, -1), strict=True)))
    async with judging(book, judge, **options):
        await all_judged(book)
        await book.ledger.write(sessions.close_session, SessionKey("me", "s"))
        await until(lambda: book.scalar("SELECT settled FROM sessions") == 1)
    assert [score(book, turn) for turn in turns] == [-1, 1 if chosen else 0, -1]


async def test_a_session_that_ends_while_it_is_judged_is_looked_at_afterwards(book: Book) -> None:
    turns = ready(book, 2)
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        if case.turn == turns[1]:
            await gate.wait()
        return Opinion(-1.0 if case.turn == turns[0] else 0.0)

    async with judging(book, ScriptedJudge(say)):
        await book.ledger.write(sessions.close_session, SessionKey("me", "s"))
        await until(lambda: score(book, turns[0]) == -1)
        assert book.scalar("SELECT settled FROM sessions") == 0
        gate.set()
        await until(lambda: score(book, turns[1]) == 1)
    assert score(book, turns[0]) == -1


async def test_a_session_that_goes_on_gets_no_good_turn_yet(book: Book) -> None:
    (turn,) = ready(book)
    async with judging(book, ScriptedJudge(lambda case: Opinion(-1.0))):
        await all_judged(book)
        await asyncio.sleep(0.1)
    assert score(book, turn) == -1


async def warnings(book: Book, caplog: pytest.LogCaptureFixture, say: Callable[[Case], Opinion]) -> list[str]:
    with caplog.at_level(logging.WARNING, "openclaw_rl.judge.loop"):
        async with judging(book, ScriptedJudge(say), workers=8) as at_work:
            await all_judged(book)
            # The warning comes after the verdict is stored.
            await until(lambda: not at_work.loop._running)
    return [record.getMessage() for record in caplog.records]


async def test_a_judge_that_always_says_the_same_is_warned_of_once(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    ready(book, COLLAPSE_WINDOW + 5)
    said = await warnings(book, caplog, lambda case: Opinion(1.0))
    assert len(said) == 1
    assert f"The last {COLLAPSE_WINDOW} verdicts are all +1" in said[0]
    assert read_status(book.db, None, {}).trouble == said[0]


async def test_a_judge_that_mostly_has_nothing_to_say_is_warned_of(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    ready(book, COLLAPSE_WINDOW)
    said = await warnings(
        book, caplog, lambda case: Opinion(1.0) if case.turn % 5 == 0 else Opinion(reason="it is unclear")
    )
    assert len(said) == 1
    assert f"The judge abstained on 40 of the last {COLLAPSE_WINDOW} turns" in said[0]
    assert "custom: it is unclear" in said[0]


async def test_a_judge_that_tells_turns_apart_is_not_warned_of(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    ready(book, COLLAPSE_WINDOW + 5)
    assert await warnings(book, caplog, lambda case: Opinion(1.0 if case.turn % 3 else -1.0)) == []


async def test_a_few_equal_verdicts_are_no_reason_to_warn(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    ready(book, COLLAPSE_WINDOW - 1)
    assert await warnings(book, caplog, lambda case: Opinion(1.0)) == []

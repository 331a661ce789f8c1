"""Explicit feedback counts more than any judge."""

import asyncio

from openclaw_rl.judge.judges.base import Case, Opinion
from openclaw_rl.ledger.turns import add_feedback, set_next_state
from openclaw_rl.types import Feedback, Source, State
from support.judging import (
    CAME,
    ScriptedJudge,
    all_judged,
    judging,
    ready,
    score,
    until,
)
from support.records import Book, a_turn


async def test_explicit_feedback_beats_every_judge(book: Book) -> None:
    turn = book.capture(a_turn(completion="c"))
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-0.5, "no, that is wrong"))
    book.ledger.submit(set_next_state, turn, CAME)
    judge = ScriptedJudge(lambda case: Opinion(1.0))
    async with judging(book, judge):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source) == (-0.5, Source.EXPLICIT)
    assert judge.asked == []


async def test_the_last_word_counts_and_an_environment_gives_rewards_not_hints(book: Book) -> None:
    book.capture(a_turn(completion="c"))
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(1.0, "wonderful"))
    await book.ledger.write(
        add_feedback, "me", "c", 0, Feedback(-1.0, "exit status was 1, and so on", Source.ENVIRONMENT)
    )
    judge = ScriptedJudge(lambda case: Opinion(None, ()))
    async with judging(book, judge, method="combine"):
        await all_judged(book)
    verdict = book.read(1).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source, verdict.hints) == (-1.0, Source.ENVIRONMENT, ())


async def test_what_was_explicitly_said_against_a_turn_is_its_hint(book: Book) -> None:
    book.capture(a_turn(completion="c"))
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-1.0, "Give  it\nin kilometres."))
    judge = ScriptedJudge(lambda case: Opinion(1.0, ("another hint",)))
    async with judging(book, judge, method="combine"):
        await all_judged(book)
    verdict = book.read(1).verdict
    assert verdict is not None
    assert [hint.text for hint in verdict.hints] == ["Give it in kilometres."]
    assert judge.asked == []


async def test_explicit_words_about_form_are_said_as_an_instruction(book: Book) -> None:
    """Like wishes in the conversation."""
    (turn,) = ready(book, completion="c")
    await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-1.0, "too long"))
    async with judging(book, method="combine", teacher=None):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert [hint.text for hint in verdict.hints] == ["Answer in one short sentence only."]


async def test_feedback_that_arrives_while_a_turn_is_judged_is_heard(book: Book) -> None:
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = ScriptedJudge(say)
    (turn,) = ready(book, completion="c")
    async with judging(book, judge):
        await until(lambda: judge.now == 1)
        await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-1.0))
        gate.set()
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source) == (-1.0, Source.EXPLICIT)
    assert judge.asked == [turn]


async def test_feedback_after_the_verdict_takes_its_place(book: Book) -> None:
    judge = ScriptedJudge(lambda case: Opinion(1.0))
    (turn,) = ready(book, completion="c")
    async with judging(book, judge):
        await until(lambda: book.state(turn) is State.JUDGED)
        await book.ledger.write(add_feedback, "me", "c", 0, Feedback(-1.0))
        await until(lambda: score(book, turn) == -1.0)
    assert book.state(turn) is State.JUDGED
    assert book.scalar("SELECT count(*) FROM verdicts") == 1


async def test_feedback_revives_a_turn_that_was_dropped(book: Book) -> None:
    judge = ScriptedJudge(lambda case: Opinion(0.0))
    (turn,) = ready(book, completion="c")
    async with judging(book, judge):
        await until(lambda: book.state(turn) is State.DROPPED)
        await book.ledger.write(add_feedback, "me", "c", 0, Feedback(1.0))
        await until(lambda: book.state(turn) is State.JUDGED)
    assert book.read(turn).reason == ""

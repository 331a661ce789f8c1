"""A turn that cannot be judged abstains after some trials, and others are judged."""

import asyncio

import pytest

from openclaw_rl.judge.judges.base import Case, JudgeFailed, Opinion
from openclaw_rl.judge.loop import TRIALS
from openclaw_rl.ledger.turns import ready_turns
from openclaw_rl.methods.base import Method
from openclaw_rl.types import Source, State
from support.judge_server import JudgeServer, Reply, completion, opinion
from support.judging import (
    HINT,
    ScriptedJudge,
    all_judged,
    endpoint,
    judging,
    ready,
    score,
    until,
)
from support.records import Book


async def test_a_turn_that_the_judge_cannot_deal_with_abstains_after_some_trials(
    book: Book, server: JudgeServer
) -> None:
    bad, *others = ready(book, 5)
    words = book.read(bad).messages[0]["content"] + "\n"
    good = opinion()
    server.answer = lambda body: (
        Reply(400, b"this turn is odd") if words in body["messages"][-1]["content"] else good(body)
    )
    async with endpoint(server) as judge, judging(book, judge) as at_work:
        await all_judged(book)
        await until(lambda: at_work.metric("openclaw_abstentions_total") == 1)
        await until(lambda: at_work.metric("openclaw_judge_failures_total") == TRIALS)
        assert at_work.down is None
    asked = [body for body in server.requests if words in body["messages"][-1]["content"]]
    assert len(asked) == TRIALS
    stored = book.read(bad)
    assert stored.state is State.DROPPED
    why = f"{TRIALS} trials failed: the judge answers 400: this turn is odd"
    assert stored.reason == f"the judge abstained: {why}"
    assert stored.verdict is not None
    assert (stored.verdict.score, stored.verdict.reason) == (None, why)
    assert {score(book, turn) for turn in others} == {1.0}


async def test_a_turn_over_which_the_judge_falls_while_it_answers_others_abstains(
    book: Book, server: JudgeServer
) -> None:
    """A turn is blamed if only this turn gets status 500."""
    bad, *others = ready(book, 8)
    words = book.read(bad).messages[0]["content"] + "\n"
    good = opinion()
    server.answer = lambda body: Reply(500) if words in body["messages"][-1]["content"] else good(body)
    async with endpoint(server) as judge, judging(book, judge, workers=1):
        for _ in range(100):
            if book.state(bad) is not State.READY:
                break
            others += ready(book)
            await asyncio.sleep(0.05)
        await all_judged(book)
    assert book.read(bad).reason.startswith(f"the judge abstained: {TRIALS} trials failed: ")
    assert {score(book, turn) for turn in others} == {1.0}


@pytest.mark.parametrize("error", [JudgeFailed("odd"), ZeroDivisionError("oh"), ValueError("a \ud83d b")])
async def test_whatever_a_judge_raises_others_are_judged(book: Book, error: Exception) -> None:
    bad, *others = ready(book, 4)

    def say(case: Case) -> Opinion:
        if case.turn == bad:
            raise error
        return Opinion(1.0)

    judge = ScriptedJudge(say)
    async with judging(book, judge):
        await all_judged(book)
    assert judge.asked.count(bad) == TRIALS
    assert book.state(bad) is State.DROPPED
    assert {score(book, turn) for turn in others} == {1.0}


async def test_half_a_character_in_what_a_judge_says_is_no_endless_trial(book: Book) -> None:
    (turn,) = ready(book)

    def say(case: Case) -> Opinion:
        raise JudgeFailed("half \ud83d a character")

    judge = ScriptedJudge(say)
    async with judging(book, judge):
        await all_judged(book)
    assert judge.asked == [turn] * TRIALS
    assert book.read(turn).reason.startswith("the judge abstained")


async def test_a_hint_with_half_a_character_is_stored(book: Book, server: JudgeServer) -> None:
    server.answer = lambda body: completion("[HINT_START]Say it with \ud83d in it.[HINT_END] \\boxed{1}")
    (turn,) = ready(book)
    async with endpoint(server, votes=1) as judge, judging(book, judge, method="opd"):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert len(verdict.hints) == 1
    assert "program" not in verdict.reason


async def test_given_up_turns_have_saved_nothing(book: Book, server: JudgeServer) -> None:
    server.answer = lambda body: Reply(400)
    ready(book)
    async with endpoint(server) as judge, judging(book, judge, method="combine") as at_work:
        await all_judged(book)
        assert at_work.metric("openclaw_judge_calls_saved_total") == 0


async def test_what_cheaper_judges_made_needless_is_counted(book: Book, server: JudgeServer) -> None:
    one, _two = ready(book, 2)
    rules = ScriptedJudge(lambda case: Opinion(1.0) if case.turn == one else Opinion(reason="unclear"))
    async with endpoint(server, votes=5) as judge, judging(book, rules, judge) as at_work:
        await all_judged(book)
        await until(lambda: at_work.metric("openclaw_judge_calls_saved_total") == 5)
    assert len(server.requests) == 1


async def test_a_judge_is_asked_only_for_what_those_before_it_left_open(book: Book, server: JudgeServer) -> None:
    server.answer = opinion("1", HINT)
    (turn,) = ready(book)
    rules = ScriptedJudge(lambda case: Opinion(-1.0, None, reason="rejection"))
    async with endpoint(server) as judge, judging(book, rules, judge, method="combine"):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source, [hint.text for hint in verdict.hints]) == (-1.0, Source.CUSTOM, [HINT])
    assert {vote.question for vote in verdict.votes} == {"hint"}


async def test_turns_that_cannot_be_read_are_dropped_and_the_others_judged(
    book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    """More damaged turns than workers, which once stopped all judging and filled the log."""
    turns = ready(book, 8)
    damaged, others = turns[:5], turns[5:]
    for turn in damaged:
        book.damage(turn)
    judge = ScriptedJudge(lambda case: Opinion(1.0))
    async with judging(book, judge, workers=2):
        await until(lambda: not book.ledger.read(ready_turns, (), 10))
    assert judge.asked == others
    assert {score(book, turn) for turn in others} == {1.0}
    for turn in damaged:
        state, reason = book.rows(f"SELECT state, reason FROM turns WHERE number = {turn}")[0]
        assert (state, reason[:9]) == ("dropped", "damaged: ")
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert sorted(said) == sorted(said_of(turn) for turn in damaged)


def said_of(turn: int) -> str:
    return f"Turn {turn} is not judged: turn {turn} is damaged: what is stored of it cannot be read (it is no message)."


async def test_a_method_that_fails_on_every_verdict_does_not_try_without_end(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = ready(book, 3)
    judge = ScriptedJudge(lambda case: Opinion(1.0))
    async with judging(book, judge) as at_work:
        monkeypatch.setattr(at_work.loop, "method", BrokenMethod(at_work.loop.method))
        await all_judged(book)
    assert sorted(judge.asked) == sorted(turns * TRIALS)
    assert {book.state(turn) for turn in turns} == {State.DROPPED}


class BrokenMethod:
    """A method whose decision about a verdict fails."""

    def __init__(self, method: Method) -> None:
        self.questions = method.questions
        self.rewards_best_turn = False

    def sample_kind(self, *_: object) -> None:
        raise ZeroDivisionError("a bug of the method")

"""Turns are judged as they become ready: none is lost, and none is judged twice."""

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from openclaw_rl.judge import loop
from openclaw_rl.judge.judges.base import Case, JudgeFailed, Opinion
from openclaw_rl.judge.teacher import Teacher
from openclaw_rl.ledger import deletion, pages, verdicts
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.turns import ready_turns, set_next_state
from openclaw_rl.ledger.verdicts import any_unsettled
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SampleKind, Source, State
from support.fakes import ScriptedSampler
from support.judge_server import JudgeServer, completion, opinion
from support.judging import (
    CAME,
    HINT,
    ScriptedJudge,
    all_judged,
    endpoint,
    judging,
    open_turns,
    ready,
    score,
    until,
)
from support.records import Book, a_turn


async def test_judging_starts_when_the_next_state_arrives(book: Book) -> None:
    judge = ScriptedJudge(lambda case: Opinion(1.0))
    async with judging(book, judge):
        turn = book.capture(a_turn())
        await asyncio.sleep(0.05)
        assert judge.asked == [], "nothing came next yet"
        book.ledger.submit(set_next_state, turn, CAME)
        await until(lambda: book.state(turn) is State.JUDGED)
    stored = book.read(turn)
    assert stored.sample is SampleKind.RL
    assert stored.verdict is not None
    assert (stored.verdict.score, stored.verdict.source) == (1.0, Source.CUSTOM)
    assert judge.asked == [turn]


async def test_turns_that_were_ready_before_the_start_are_judged(book: Book) -> None:
    turns = ready(book, 9)
    judge = ScriptedJudge(lambda case: Opinion(-1.0))
    async with judging(book, judge):
        await all_judged(book)
    assert sorted(judge.asked) == turns
    assert {score(book, turn) for turn in turns} == {-1.0}


async def test_no_more_turns_than_workers_are_judged_at_the_same_time(book: Book) -> None:
    turns, gate = ready(book, 7), asyncio.Event()

    async def wait(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = ScriptedJudge(wait)
    async with judging(book, judge, workers=3):
        await until(lambda: judge.now == 3)
        await asyncio.sleep(0.05)
        assert judge.now == 3
        gate.set()
        await all_judged(book)
    assert judge.most == 3
    assert sorted(judge.asked) == turns


async def test_a_slow_turn_holds_nobody_up(book: Book) -> None:
    (slow,) = ready(book)
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        if case.turn == slow:
            await gate.wait()
        return Opinion(1.0)

    async with judging(book, ScriptedJudge(say), workers=2):
        others = ready(book, 5)
        await until(lambda: all(book.state(turn) is State.JUDGED for turn in others))
        assert book.state(slow) is State.READY
        gate.set()
        await all_judged(book)


async def test_votes_that_contradict_each_other_drop_the_turn_with_the_reason(book: Book, server: JudgeServer) -> None:
    server.answer = lambda body: completion("\\boxed{1}", "\\boxed{-1}", "\\boxed{0}")
    (turn,) = ready(book)
    async with endpoint(server) as judge, judging(book, judge) as at_work:
        await all_judged(book)
        await until(lambda: at_work.metric("openclaw_vote_agreement_count") == 1)
    stored = book.read(turn)
    assert (stored.state, stored.reason) == (State.DROPPED, "the judge is neutral")
    assert stored.verdict is not None
    assert [vote.value for vote in stored.verdict.votes] == [1, -1, 0]
    assert stored.verdict.score == 0


async def test_both_questions_and_the_teacher(book: Book, server: JudgeServer, tiny_model: Path) -> None:
    server.answer = opinion("-1", HINT)
    renderer = ChatRenderer(tiny_model)
    messages = [{"role": "user", "content": "How far?"}]
    prompt = renderer.prompt(renderer.text(messages)).ids
    (turn,) = ready(book, messages=messages, prompt_ids=prompt)
    sampler = ScriptedSampler(lambda request, index: [])
    async with (
        endpoint(server) as judge,
        judging(book, judge, method="combine", teacher=Teacher(sampler, renderer)) as at_work,
    ):
        await all_judged(book)
        await until(lambda: at_work.metric("openclaw_judge_tokens_total") > 100)
        await until(lambda: at_work.metric("openclaw_verdicts_total") == 1)
    stored = book.read(turn)
    assert stored.sample is SampleKind.OPD_RL
    assert stored.verdict is not None
    (hint,) = stored.verdict.hints
    assert (hint.text, hint.logprobs) == (HINT, [-0.5, -0.5])
    assert len(stored.verdict.votes) == 6
    assert len(server.requests) == 2


async def test_only_the_best_hint_is_put_to_the_teacher(book: Book, tiny_model: Path) -> None:
    renderer = ChatRenderer(tiny_model)
    messages = [{"role": "user", "content": "How far?"}]
    ready(book, messages=messages, prompt_ids=renderer.prompt(renderer.text(messages)).ids)
    sampler = ScriptedSampler(lambda request, index: [])
    judge = ScriptedJudge(lambda case: Opinion(None, ("the best hint there is", "another hint")))
    async with judging(book, judge, method="opd", teacher=Teacher(sampler, renderer)):
        await all_judged(book)
    verdict = book.read(1).verdict
    assert verdict is not None
    assert [len(hint.logprobs) for hint in verdict.hints] == [2, 0]
    assert len(sampler.scored) == 1


async def test_a_hint_without_a_hinted_prompt_leaves_the_score(book: Book, tiny_model: Path) -> None:
    turn, other = ready(book, 2)  # prompts that no conversation renders to
    judge = ScriptedJudge(lambda case: Opinion(-1.0 if case.turn == turn else 0.0, ("a hint that is good",)))
    teacher = Teacher(ScriptedSampler(lambda request, index: []), ChatRenderer(tiny_model))
    async with judging(book, judge, method="combine", teacher=teacher):
        await all_judged(book)
    assert book.read(turn).sample is SampleKind.RL
    assert book.read(other).reason == (
        "no teacher for the hint: the conversation no longer renders to the recorded prompt"
    )


async def test_a_turn_that_is_forgotten_while_it_is_judged_leaves_nothing(book: Book) -> None:
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = ScriptedJudge(say)
    (turn,) = ready(book, session="gone")
    async with judging(book, judge) as at_work:
        await until(lambda: judge.now == 1)
        (summary,) = pages.session_summaries(book.db, id="gone")
        book.change(deletion.delete_sessions, [summary.number])
        gate.set()
        await until(lambda: judge.now == 0)
        (other,) = ready(book)
        await until(lambda: book.state(other) is State.JUDGED)
        await until(lambda: at_work.metric("openclaw_verdicts_total") == 1)
    assert judge.asked == [turn, other]
    assert book.scalar("SELECT count(*) FROM verdicts") == 1


class Passes:
    """Counts how often a loop looks at its ledger."""

    def __init__(self, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0

        def counted(db: sqlite3.Connection) -> bool:
            self.count += 1
            return any_unsettled(db)

        monkeypatch.setattr(verdicts, "any_unsettled", counted)


async def test_a_turn_that_is_forgotten_while_it_waits_to_be_tried_again_is_not_waited_for(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle loop does not poll the ledger."""

    def say(case: Case) -> Opinion:
        raise JudgeFailed("odd")

    judge, passes = ScriptedJudge(say), Passes(book, monkeypatch)
    ready(book, session="gone")
    async with judging(book, judge):
        await until(lambda: judge.asked == [1] and not judge.now)
        (summary,) = pages.session_summaries(book.db, id="gone")
        book.change(deletion.delete_sessions, [summary.number])
        await asyncio.sleep(0.3)
        passes.count = 0
        await asyncio.sleep(0.6)
        assert passes.count < 10


async def test_a_loop_whose_turn_is_tried_again_sleeps_while_the_judge_thinks(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        if len(judge.asked) == 1:
            raise JudgeFailed("odd")
        await gate.wait()
        return Opinion(1.0)

    judge, passes = ScriptedJudge(say), Passes(book, monkeypatch)
    ready(book)
    async with judging(book, judge):
        await until(lambda: len(judge.asked) == 2)
        passes.count = 0
        await asyncio.sleep(0.6)
        assert passes.count < 10
        gate.set()
        await all_judged(book)


async def test_verdicts_wait_for_a_ledger_that_cannot_be_written(book: Book) -> None:
    book.ledger.writer.retry_seconds = 0.05
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = ScriptedJudge(say)
    turns = ready(book, 3)
    book.ledger.writer._connection.execute("PRAGMA busy_timeout = 0")
    with contextlib.closing(connect(book.folder / FILE)) as other:
        async with judging(book, judge):
            await until(lambda: judge.now == 3)
            other.execute("BEGIN IMMEDIATE")
            gate.set()
            await until(lambda: book.ledger.suspended is not None)
            await asyncio.sleep(0.1)
            assert open_turns(book) == 3
            other.execute("ROLLBACK")
            await all_judged(book)
    assert [score(book, turn) for turn in turns] == [1.0] * 3
    assert book.scalar("SELECT count(*) FROM verdicts") == 3


async def test_judging_goes_on_after_the_ledger_could_not_be_read(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = True
    ask = ready_turns

    def sometimes(db: sqlite3.Connection, besides: Sequence[int], limit: int) -> list[int]:
        if broken:
            raise sqlite3.OperationalError("disk I/O error")
        return ask(db, besides, limit)

    monkeypatch.setattr(loop, "ready_turns", sometimes)
    (turn,) = ready(book)
    async with judging(book, ScriptedJudge(lambda case: Opinion(1.0)), idle_seconds=0.2):
        await asyncio.sleep(0.1)
        broken = False
        await until(lambda: book.state(turn) is State.JUDGED)


async def test_judging_that_is_stopped_in_the_middle_goes_on_at_the_next_start(book: Book) -> None:
    first = ScriptedJudge(lambda case: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    turns = ready(book, 6)
    async with judging(book, first, workers=4):
        await until(lambda: first.now == 4)
    assert first.now == 0
    assert book.scalar("SELECT count(*) FROM verdicts") == 0
    second = ScriptedJudge(lambda case: Opinion(1.0))
    async with judging(book, second):
        await all_judged(book)
    assert sorted(second.asked) == turns

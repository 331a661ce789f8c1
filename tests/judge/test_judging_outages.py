"""Turns wait for a judge or a teacher that is down, and nothing is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.judge.askers import AskParams
from openclaw_rl.judge.judges import custom
from openclaw_rl.judge.judges.base import FAILURES, Breaker, Case, JudgeDown, Opinion
from openclaw_rl.judge.judges.custom import CustomJudge
from openclaw_rl.judge.judges.llm import LlmJudge
from openclaw_rl.judge.loop import TRIALS
from openclaw_rl.judge.teacher import Teacher
from openclaw_rl.ledger.status import read_status
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SampleKind, ScoreRequest, State
from support.fakes import ScriptedSampler
from support.judge_server import Body, JudgeServer, Reply, opinion
from support.judging import (
    HINT,
    ScriptedJudge,
    all_judged,
    endpoint,
    impatient,
    judging,
    open_turns,
    ready,
    score,
    until,
)
from support.records import Book


@pytest.mark.parametrize(("method", "questions"), [("rl", 1), ("combine", 2)])
async def test_turns_wait_for_a_judge_that_is_down_and_nothing_is_lost(
    book: Book, server: JudgeServer, method: str, questions: int
) -> None:
    server.stop()
    turns = ready(book, 6)
    async with endpoint(server) as judge, judging(book, judge, method=method) as at_work:
        await until(lambda: bool(at_work.down))
        assert "cannot be reached" in (at_work.down or "")
        told = read_status(book.db, "http://here", {"judge": f"suspended: {at_work.down}"})
        assert told.waiting_for.startswith("6 turns wait for the judge, which cannot be asked: http://127.0.0.1")
        await asyncio.sleep(0.5)
        assert open_turns(book) == 6, "many trials later they still wait"
        server.start()
        await all_judged(book)
        assert at_work.down is None
        await until(lambda: at_work.metric("openclaw_verdicts_total") == 6)
        await until(lambda: at_work.metric("openclaw_judge_failures_total") > 0)
    assert {score(book, turn) for turn in turns} == {1.0}
    assert len(server.requests) == 6 * questions, "each was asked about once"


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_turns_wait_also_for_one_that_refuses(book: Book, server: JudgeServer, status: int) -> None:
    server.answer = lambda body: Reply(status)
    ready(book, 5)
    async with endpoint(server) as judge, judging(book, judge) as at_work:
        await until(lambda: str(status) in (at_work.down or ""))
        await asyncio.sleep(0.3)
        assert open_turns(book) == 5
        server.answer = opinion()
        await all_judged(book)
    assert {score(book, turn) for turn in range(1, 6)} == {1.0}


async def test_a_judge_that_is_down_is_left_alone(book: Book, server: JudgeServer) -> None:
    breaker = Breaker(first_pause=30.0, longest_pause=30.0)
    server.answer = lambda body: Reply(503)
    ready(book, 40)
    async with endpoint(server, breaker=breaker) as judge, judging(book, judge) as at_work:
        await until(lambda: bool(at_work.down))
        await asyncio.sleep(0.2)
        assert len(server.requests) <= FAILURES + at_work.loop.workers


async def test_a_judge_that_often_refuses_others_loses_no_turn(book: Book, server: JudgeServer) -> None:
    """With a rate limit, each turn is refused now and then while others are answered. No turn is blamed."""
    asked: dict[str, int] = {}

    def limited(body: Body) -> Reply:
        who = body["messages"][-1]["content"]
        asked[who] = asked.get(who, 0) + 1
        return opinion()(body) if asked[who] > 2 * TRIALS else Reply(429)

    server.answer = limited
    turns = ready(book, 8)
    async with endpoint(server) as judge, judging(book, judge):
        judge.breaker._answered()  # it has answered before
        for _ in range(200):
            if not open_turns(book):
                break
            judge.breaker._answered()  # and answers others
            await asyncio.sleep(0.05)
    assert [score(book, turn) for turn in turns] == [1.0] * 8


async def test_turns_that_were_not_even_asked_about_are_not_given_up(
    book: Book, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that the open circuit breaker refuses has had no trial."""
    turns = ready(book, 4)
    async with endpoint(server) as judge:
        breaker, now, refused = judge.breaker, [0.0], [0]
        breaker.reason, breaker._until, breaker._clock = "away", 0.05, lambda: now[0]
        call = breaker.call

        async def counted(ask: Callable[[], Awaitable[Any]]) -> Any:
            refused[0] += 1
            return await call(ask)

        monkeypatch.setattr(breaker, "call", counted)
        async with judging(book, judge):
            for trial in range(1, 3 * TRIALS + 1):
                breaker.answered += 1
                await until(lambda trial=trial: refused[0] >= 4 * trial)
            assert open_turns(book) == 4
            now[0] = 1.0
            await all_judged(book)
    assert [score(book, turn) for turn in turns] == [1.0] * 4


async def test_a_teacher_that_is_away_is_waited_for(book: Book, server: JudgeServer, tiny_model: Path) -> None:
    """The judge answers, but the engine that scores hints restarts. The turn is not blamed."""
    server.answer = opinion("-1", HINT)
    renderer = ChatRenderer(tiny_model)
    messages = [{"role": "user", "content": "How far?"}]
    (turn,) = ready(book, messages=messages, prompt_ids=renderer.prompt(renderer.text(messages)).ids)
    away = True

    def scores(request: ScoreRequest) -> list[float]:
        if away:
            raise EngineUnavailable("The worker is starting.")
        return [-0.25] * request.last_n

    sampler = ScriptedSampler(lambda request, index: [], scores=scores)
    async with (
        endpoint(server) as judge,
        judging(book, judge, method="combine", teacher=Teacher(sampler, renderer)) as at_work,
    ):
        await until(lambda: len(sampler.scored) > 2 * TRIALS or not open_turns(book))
        assert book.state(turn) is State.READY
        assert at_work.down == "The worker is starting."
        away = False
        await all_judged(book)
        assert at_work.down is None
    assert book.read(turn).sample is SampleKind.OPD_RL


async def test_a_judge_that_is_too_slow_for_everybody_is_down(book: Book, server: JudgeServer) -> None:
    gate = asyncio.Event()

    class Slow:
        async def ask(self, *_: Any) -> list[Any]:
            await gate.wait()
            return []

    ready(book, 4)
    judge = LlmJudge(Slow(), AskParams(3, 0.6, 100), timeout=0.02)
    judge.breaker = impatient()
    async with judging(book, judge) as at_work:
        await until(lambda: at_work.down == "the judge does not answer in time")
        await asyncio.sleep(0.2)
        assert open_turns(book) == 4


async def test_a_judge_that_answers_is_not_down(book: Book) -> None:
    async with judging(book, ScriptedJudge(lambda case: Opinion(1.0))) as at_work:
        assert at_work.down is None


async def test_what_a_judge_that_is_down_answers_with_a_pause_is_heeded(book: Book) -> None:
    def say(case: Case) -> Opinion:
        if len(judge.asked) == 1:
            raise JudgeDown("busy", 0.2)
        return Opinion(1.0)

    judge = ScriptedJudge(say)
    ready(book)
    async with judging(book, judge):
        await all_judged(book)
    assert len(judge.asked) == 2


HANGING_IN_A_THREAD = """
import time
from pathlib import Path

def score(*parts):
    while not Path(__file__).with_name("mended").exists():
        time.sleep(0.005)
    return 1
"""
HANGING_AS_A_COROUTINE = """
import asyncio
from pathlib import Path

async def score(*parts):
    while not Path(__file__).with_name("mended").exists():
        await asyncio.sleep(0.005)
    return 1
"""


@pytest.mark.parametrize("source", [HANGING_IN_A_THREAD, HANGING_AS_A_COROUTINE])
async def test_a_custom_judge_that_hangs_is_down_until_it_answers_again(
    book: Book, tmp_path: Path, source: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/readyz` shows what `Loops.judge` returns."""
    monkeypatch.setattr(custom, "HANGING_PAUSE", 0.05)
    file = tmp_path / "my_judge.py"
    file.write_text(source)
    turns = ready(book, 4)
    judge = CustomJudge(str(file), {}, timeout=0.05)
    judge.breaker = impatient()
    async with judging(book, judge) as at_work:
        server = BackgroundLoops(at_work.loop, None, 5.0)
        assert server.judge() == "on"
        await until(lambda: server.judge() != "on")
        assert server.judge() == "suspended: my_judge.py takes longer than --judge-timeout 0.05"
        assert open_turns(book) == 4, "it is no turn's fault"
        judge.timeout = 30.0
        (tmp_path / "mended").touch()
        await all_judged(book)
        assert server.judge() == "on"
    assert caplog.text.count("Turns wait for their judge: my_judge.py takes longer") == 1
    assert {score(book, turn) for turn in turns} == {1.0}

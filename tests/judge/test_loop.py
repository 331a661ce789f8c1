"""Turns are judged as they become ready: none is lost, none is judged twice, and whatever goes wrong stays small."""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from openclaw_rl.app.config import Config
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.judge import circuit_breaker, loop
from openclaw_rl.judge.askers import AskParams, EndpointAsker
from openclaw_rl.judge.case import Case
from openclaw_rl.judge.dispatch import Signals
from openclaw_rl.judge.errors import JudgeDown, JudgeFailed
from openclaw_rl.judge.judges import Explicit, Judge, LlmJudge, Opinion, Panel, Questions
from openclaw_rl.judge.loop import TRIALS, JudgeLoop
from openclaw_rl.judge.metrics import JudgeMetrics
from openclaw_rl.judge.teacher import Teacher
from openclaw_rl.ledger import changes, queries
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.status import COLLAPSE_WINDOW, read_status
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import Feedback, SampleKind, ScoreRequest, SessionKey, Source, State, Vote
from support.fakes import ScriptedSampler
from support.judge_server import Body, JudgeServer, Reply, completion, opinion
from support.records import Book, a_turn

CAME = [{"role": "user", "content": "thank you"}]
HINT = "Give the distance in kilometres."


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer(opinion())
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are what they are for people; tests need not wait so long."""
    monkeypatch.setattr(loop, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE", 0.1)


class Scripted:
    """A judge that says what `say` does, and notes whom it was asked about."""

    source = Source.CUSTOM

    def __init__(self, say: Callable[[Case], Awaitable[Opinion] | Opinion]) -> None:
        self.say = say
        self.asked: list[int] = []
        self.now = self.most = 0

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        self.asked.append(case.turn)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            said = self.say(case)
            return said if isinstance(said, Opinion) else await said
        finally:
            self.now -= 1


class Judging:
    """A loop at work, and what it has counted."""

    def __init__(self, judging: JudgeLoop, registry: CollectorRegistry) -> None:
        self.loop, self.registry = judging, registry

    @property
    def down(self) -> str:
        return self.loop.down

    def metric(self, name: str) -> float:
        lines = generate_latest(self.registry).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))


@contextlib.asynccontextmanager
async def judging(
    book: Book, *judges: Judge, method: str = "rl", teacher: Teacher | None = None, workers: int = 4, **options: Any
) -> AsyncIterator[Judging]:
    registry = CollectorRegistry()
    signals = Signals.of(Config(method=method, **options))
    panel = Panel([Explicit(), *judges])
    made = JudgeLoop(book.ledger, panel, teacher, signals, JudgeMetrics(registry), workers=workers)
    task = asyncio.create_task(made.run())
    try:
        yield Judging(made, registry)
        assert not task.done(), "it goes on until it is cancelled"
    finally:
        task.cancel()
        async with asyncio.timeout(60):  # it must not miss that it is to end, whatever it was about to do
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def endpoint(server: JudgeServer, votes: int = 3, timeout: float = 20) -> AsyncIterator[LlmJudge]:
    asker = EndpointAsker(server.url, "judge-1")
    yield LlmJudge(asker, AskParams(votes, 0.6, 100), timeout=timeout)
    await asker.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def ready(book: Book, count: int = 1, **given: Any) -> list[int]:
    """Turns whose next state is known."""
    turns = [book.capture(a_turn(**given)) for _ in range(count)]
    for turn in turns:
        book.change(changes.set_next_state, turn, CAME)
    return turns


def open_turns(book: Book) -> int:
    return int(book.scalar("SELECT count(*) FROM turns WHERE state = 'ready'"))


async def all_judged(book: Book) -> None:
    await until(lambda: not open_turns(book))


def score(book: Book, turn: int) -> float | None:
    verdict = book.read(turn).verdict
    return verdict.score if verdict else None


# the way of a turn


async def test_judging_starts_when_the_next_state_arrives(book: Book) -> None:
    judge = Scripted(lambda case: Opinion(1.0))
    async with judging(book, judge):
        turn = book.capture(a_turn())
        await asyncio.sleep(0.05)
        assert judge.asked == [], "nothing came next yet"
        book.ledger.set_next_state(turn, CAME)
        await until(lambda: book.state(turn) is State.JUDGED)
    stored = book.read(turn)
    assert stored.sample is SampleKind.RL
    assert stored.verdict is not None
    assert (stored.verdict.score, stored.verdict.source) == (1.0, Source.CUSTOM)
    assert judge.asked == [turn]


async def test_turns_that_were_ready_before_the_start_are_judged(book: Book) -> None:
    turns = ready(book, 9)
    judge = Scripted(lambda case: Opinion(-1.0))
    async with judging(book, judge):
        await all_judged(book)
    assert sorted(judge.asked) == turns
    assert {score(book, turn) for turn in turns} == {-1.0}


async def test_no_more_turns_than_workers_are_judged_at_the_same_time(book: Book) -> None:
    turns, gate = ready(book, 7), asyncio.Event()

    async def wait(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = Scripted(wait)
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

    async with judging(book, Scripted(say), workers=2):
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
    judge = Scripted(lambda case: Opinion(None, ("the best hint there is", "another hint")))
    async with judging(book, judge, method="opd", teacher=Teacher(sampler, renderer)):
        await all_judged(book)
    verdict = book.read(1).verdict
    assert verdict is not None
    assert [len(hint.logprobs) for hint in verdict.hints] == [2, 0]
    assert len(sampler.scored) == 1


async def test_a_hint_without_a_hinted_prompt_leaves_the_score(book: Book, tiny_model: Path) -> None:
    turn, other = ready(book, 2)  # prompts that no conversation renders to
    judge = Scripted(lambda case: Opinion(-1.0 if case.turn == turn else 0.0, ("a hint that is good",)))
    teacher = Teacher(ScriptedSampler(lambda request, index: []), ChatRenderer(tiny_model))
    async with judging(book, judge, method="combine", teacher=teacher):
        await all_judged(book)
    assert book.read(turn).sample is SampleKind.RL
    assert book.read(other).reason == (
        "no teacher for the hint: the recorded prompt is not what the conversation renders to now"
    )


# a judge that is away


@pytest.mark.parametrize(("method", "questions"), [("rl", 1), ("combine", 2)])
async def test_turns_wait_for_a_judge_that_is_down_and_nothing_is_lost(
    book: Book, server: JudgeServer, method: str, questions: int
) -> None:
    server.stop()
    turns = ready(book, 6)
    async with endpoint(server) as judge, judging(book, judge, method=method) as at_work:
        await until(lambda: bool(at_work.down))
        assert "cannot be reached" in at_work.down
        told = read_status(book.db, "http://here", {"judge": f"suspended: {at_work.down}"})
        assert told.why_no_update.startswith("6 turns wait for the judge, which cannot be asked: http://127.0.0.1")
        await asyncio.sleep(0.5)
        assert open_turns(book) == 6, "many trials later they still wait"
        server.start()
        await all_judged(book)
        assert at_work.down == ""
        await until(lambda: at_work.metric("openclaw_verdicts_total") == 6)
        await until(lambda: at_work.metric("openclaw_judge_failures_total") > 0)
    assert {score(book, turn) for turn in turns} == {1.0}
    assert len(server.requests) == 6 * questions, "each was asked about once"


@pytest.mark.parametrize("status", [401, 429, 503])
async def test_turns_wait_also_for_one_that_refuses(book: Book, server: JudgeServer, status: int) -> None:
    server.answer = lambda body: Reply(status)
    ready(book, 5)
    async with endpoint(server) as judge, judging(book, judge) as at_work:
        await until(lambda: str(status) in at_work.down)
        await asyncio.sleep(0.3)
        assert open_turns(book) == 5
        server.answer = opinion()
        await all_judged(book)
    assert {score(book, turn) for turn in range(1, 6)} == {1.0}


async def test_a_judge_that_is_down_is_left_alone(
    book: Book, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE", 30.0)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE", 30.0)
    server.answer = lambda body: Reply(503)
    ready(book, 40)
    async with endpoint(server) as judge, judging(book, judge) as at_work:
        await until(lambda: bool(at_work.down))
        await asyncio.sleep(0.2)
        assert len(server.requests) <= circuit_breaker.FAILURES + at_work.loop.workers


async def test_a_judge_that_often_refuses_others_loses_no_turn(book: Book, server: JudgeServer) -> None:
    """A rate limit: each turn is refused now and then, while others are answered. That is no turn's fault."""
    asked: dict[str, int] = {}

    def limited(body: Body) -> Reply:
        who = body["messages"][-1]["content"]
        asked[who] = asked.get(who, 0) + 1
        return opinion()(body) if asked[who] > 2 * TRIALS else Reply(429)

    server.answer = limited
    turns = ready(book, 8)
    async with endpoint(server) as judge, judging(book, judge):
        judge.circuit_breaker._answered()  # it has answered before
        for _ in range(200):
            if not open_turns(book):
                break
            judge.circuit_breaker._answered()  # and answers others
            await asyncio.sleep(0.05)
    assert [score(book, turn) for turn in turns] == [1.0] * 8


async def test_turns_that_were_not_even_asked_about_are_not_given_up(
    book: Book, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge comes and goes. A turn that is refused because the judge is left alone has had no trial."""
    turns = ready(book, 4)
    async with endpoint(server) as judge:
        circuit_breaker, now, refused = judge.circuit_breaker, [0.0], [0]
        circuit_breaker.reason, circuit_breaker._until, circuit_breaker._clock = "away", 0.05, lambda: now[0]
        call = circuit_breaker.call

        async def counted(ask: Callable[[], Awaitable[Any]]) -> Any:
            refused[0] += 1
            return await call(ask)

        monkeypatch.setattr(circuit_breaker, "call", counted)
        async with judging(book, judge):
            for trial in range(1, 3 * TRIALS + 1):
                circuit_breaker.answered += 1
                await until(lambda trial=trial: refused[0] >= 4 * trial)
            assert open_turns(book) == 4
            now[0] = 1.0
            await all_judged(book)
    assert [score(book, turn) for turn in turns] == [1.0] * 4


async def test_a_teacher_that_is_away_is_waited_for(book: Book, server: JudgeServer, tiny_model: Path) -> None:
    """The judge answers, but the engine that scores hints restarts: no fault of the turn either."""
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
        assert "The worker is starting." in at_work.down
        away = False
        await all_judged(book)
        assert at_work.down == ""
    assert book.read(turn).sample is SampleKind.OPD_RL


async def test_a_judge_that_is_too_slow_for_everybody_is_down(book: Book, server: JudgeServer) -> None:
    gate = asyncio.Event()

    class Slow:
        async def ask(self, *_: Any) -> list[Any]:
            await gate.wait()
            return []

    ready(book, 4)
    judge = LlmJudge(Slow(), AskParams(3, 0.6, 100), timeout=0.02)
    async with judging(book, judge) as at_work:
        await until(lambda: at_work.down == "the judge does not answer in time")
        await asyncio.sleep(0.2)
        assert open_turns(book) == 4


# a turn that cannot be judged


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
        assert at_work.down == ""
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
    """An answer of 500 to one turn alone is that turn's fault in the end."""
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

    judge = Scripted(say)
    async with judging(book, judge):
        await all_judged(book)
    assert judge.asked.count(bad) == TRIALS
    assert book.state(bad) is State.DROPPED
    assert {score(book, turn) for turn in others} == {1.0}


async def test_half_a_character_in_what_a_judge_says_is_no_endless_trial(book: Book) -> None:
    (turn,) = ready(book)

    def say(case: Case) -> Opinion:
        raise JudgeFailed("half \ud83d a character")

    judge = Scripted(say)
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
    rules = Scripted(lambda case: Opinion(1.0) if case.turn == one else Opinion(reason="unclear"))
    async with endpoint(server, votes=5) as judge, judging(book, rules, judge) as at_work:
        await all_judged(book)
        await until(lambda: at_work.metric("openclaw_judge_calls_saved_total") == 5)
    assert len(server.requests) == 1


async def test_a_judge_is_asked_only_for_what_those_before_it_left_open(book: Book, server: JudgeServer) -> None:
    server.answer = opinion("1", HINT)
    (turn,) = ready(book)
    rules = Scripted(lambda case: Opinion(-1.0, None, reason="rejection"))
    async with endpoint(server) as judge, judging(book, rules, judge, method="combine"):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source, [hint.text for hint in verdict.hints]) == (-1.0, Source.CUSTOM, [HINT])
    assert {vote.question for vote in verdict.votes} == {"hint"}


# explicit words


async def test_explicit_feedback_beats_every_judge(book: Book) -> None:
    turn = book.capture(a_turn(completion="c"))
    await book.ledger.add_feedback("me", "c", 0, Feedback(-0.5, "no, that is wrong"))
    book.ledger.set_next_state(turn, CAME)
    judge = Scripted(lambda case: Opinion(1.0))
    async with judging(book, judge):
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source) == (-0.5, Source.EXPLICIT)
    assert judge.asked == []


async def test_the_last_word_counts_and_an_environment_gives_rewards_not_hints(book: Book) -> None:
    book.capture(a_turn(completion="c"))
    await book.ledger.add_feedback("me", "c", 0, Feedback(1.0, "wonderful"))
    await book.ledger.add_feedback("me", "c", 0, Feedback(-1.0, "exit status was 1, and so on", Source.ENVIRONMENT))
    judge = Scripted(lambda case: Opinion(None, ()))
    async with judging(book, judge, method="combine"):
        await all_judged(book)
    verdict = book.read(1).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source, verdict.hints) == (-1.0, Source.ENVIRONMENT, ())


async def test_what_was_explicitly_said_against_a_turn_is_its_hint(book: Book) -> None:
    book.capture(a_turn(completion="c"))
    await book.ledger.add_feedback("me", "c", 0, Feedback(-1.0, "Give  it\nin kilometres."))
    judge = Scripted(lambda case: Opinion(1.0, ("another hint",)))
    async with judging(book, judge, method="combine"):
        await all_judged(book)
    verdict = book.read(1).verdict
    assert verdict is not None
    assert [hint.text for hint in verdict.hints] == ["Give it in kilometres."]
    assert judge.asked == []


async def test_explicit_words_about_form_are_said_as_an_instruction(book: Book) -> None:
    """As those in the conversation are."""
    (turn,) = ready(book, completion="c")
    await book.ledger.add_feedback("me", "c", 0, Feedback(-1.0, "too long"))
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

    judge = Scripted(say)
    (turn,) = ready(book, completion="c")
    async with judging(book, judge):
        await until(lambda: judge.now == 1)
        await book.ledger.add_feedback("me", "c", 0, Feedback(-1.0))
        gate.set()
        await all_judged(book)
    verdict = book.read(turn).verdict
    assert verdict is not None
    assert (verdict.score, verdict.source) == (-1.0, Source.EXPLICIT)
    assert judge.asked == [turn]


async def test_feedback_after_the_verdict_takes_its_place(book: Book) -> None:
    judge = Scripted(lambda case: Opinion(1.0))
    (turn,) = ready(book, completion="c")
    async with judging(book, judge):
        await until(lambda: book.state(turn) is State.JUDGED)
        await book.ledger.add_feedback("me", "c", 0, Feedback(-1.0))
        await until(lambda: score(book, turn) == -1.0)
    assert book.state(turn) is State.JUDGED
    assert book.scalar("SELECT count(*) FROM verdicts") == 1


async def test_feedback_revives_a_turn_that_was_dropped(book: Book) -> None:
    judge = Scripted(lambda case: Opinion(0.0))
    (turn,) = ready(book, completion="c")
    async with judging(book, judge):
        await until(lambda: book.state(turn) is State.DROPPED)
        await book.ledger.add_feedback("me", "c", 0, Feedback(1.0))
        await until(lambda: book.state(turn) is State.JUDGED)
    assert book.read(turn).reason == ""


# what happens meanwhile


async def test_a_turn_that_is_forgotten_while_it_is_judged_leaves_nothing(book: Book) -> None:
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = Scripted(say)
    (turn,) = ready(book, session="gone")
    async with judging(book, judge) as at_work:
        await until(lambda: judge.now == 1)
        (summary,) = queries.sessions(book.db, id="gone")
        book.change(changes.forget, [summary.number])
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
        self.count, settle = 0, book.ledger.settle_sessions

        async def counted(at_least_one: bool) -> list[int]:
            self.count += 1
            return await settle(at_least_one)

        monkeypatch.setattr(book.ledger, "settle_sessions", counted)


async def test_a_turn_that_is_forgotten_while_it_waits_to_be_tried_again_is_not_waited_for(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop with nothing to do does nothing, rather than look a hundred times a second."""

    def say(case: Case) -> Opinion:
        raise JudgeFailed("odd")

    monkeypatch.setattr(loop, "FIRST_PAUSE", 0.1)
    judge, passes = Scripted(say), Passes(book, monkeypatch)
    ready(book, session="gone")
    async with judging(book, judge):
        await until(lambda: judge.asked == [1] and not judge.now)
        (summary,) = queries.sessions(book.db, id="gone")
        book.change(changes.forget, [summary.number])
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

    judge, passes = Scripted(say), Passes(book, monkeypatch)
    ready(book)
    async with judging(book, judge):
        await until(lambda: len(judge.asked) == 2)
        passes.count = 0
        await asyncio.sleep(0.6)
        assert passes.count < 10
        gate.set()
        await all_judged(book)


async def test_verdicts_wait_for_a_ledger_that_cannot_be_written(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.ledger.writer.RETRY_SECONDS", 0.05)
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        await gate.wait()
        return Opinion(1.0)

    judge = Scripted(say)
    turns = ready(book, 3)
    book.ledger.writer._connection.execute("PRAGMA busy_timeout = 0")
    with contextlib.closing(connect(book.folder / FILE)) as other:
        async with judging(book, judge):
            await until(lambda: judge.now == 3)
            other.execute("BEGIN IMMEDIATE")
            gate.set()
            await until(lambda: book.ledger.writer.suspended is not None)
            await asyncio.sleep(0.1)
            assert open_turns(book) == 3
            other.execute("ROLLBACK")
            await all_judged(book)
    assert [score(book, turn) for turn in turns] == [1.0] * 3
    assert book.scalar("SELECT count(*) FROM verdicts") == 3


async def test_judging_goes_on_after_the_ledger_could_not_be_read(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_SECONDS", 0.05)
    broken = True
    ask = queries.ready_turns

    def sometimes(db: sqlite3.Connection, besides: Sequence[int], limit: int) -> list[int]:
        if broken:
            raise sqlite3.OperationalError("disk I/O error")
        return ask(db, besides, limit)

    monkeypatch.setattr(queries, "ready_turns", sometimes)
    (turn,) = ready(book)
    async with judging(book, Scripted(lambda case: Opinion(1.0))):
        await asyncio.sleep(0.1)
        broken = False
        await until(lambda: book.state(turn) is State.JUDGED)


async def test_judging_that_is_stopped_in_the_middle_goes_on_at_the_next_start(book: Book) -> None:
    first = Scripted(lambda case: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    turns = ready(book, 6)
    async with judging(book, first, workers=4):
        await until(lambda: first.now == 4)
    assert first.now == 0
    assert book.scalar("SELECT count(*) FROM verdicts") == 0
    second = Scripted(lambda case: Opinion(1.0))
    async with judging(book, second):
        await all_judged(book)
    assert sorted(second.asked) == turns


# sessions without a good turn


def voting(book: Book, values: dict[int, float]) -> Scripted:
    return Scripted(lambda case: Opinion(values[case.turn], (), (Vote("score", values[case.turn]),)))  # type: ignore[arg-type]


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
        await book.ledger.close_session(SessionKey("me", "s"))
        await until(lambda: book.scalar("SELECT settled FROM sessions") == 1)
    assert [score(book, turn) for turn in turns] == [-1, 1 if chosen else 0, -1]


async def test_a_session_that_ends_while_it_is_judged_is_looked_at_afterwards(book: Book) -> None:
    turns = ready(book, 2)
    gate = asyncio.Event()

    async def say(case: Case) -> Opinion:
        if case.turn == turns[1]:
            await gate.wait()
        return Opinion(-1.0 if case.turn == turns[0] else 0.0)

    async with judging(book, Scripted(say)):
        await book.ledger.close_session(SessionKey("me", "s"))
        await until(lambda: score(book, turns[0]) == -1)
        assert book.scalar("SELECT settled FROM sessions") == 0
        gate.set()
        await until(lambda: score(book, turns[1]) == 1)
    assert score(book, turns[0]) == -1


async def test_a_session_that_goes_on_gets_no_good_turn_yet(book: Book) -> None:
    (turn,) = ready(book)
    async with judging(book, Scripted(lambda case: Opinion(-1.0))):
        await all_judged(book)
        await asyncio.sleep(0.1)
    assert score(book, turn) == -1


# verdicts that say nothing


async def warnings(book: Book, caplog: pytest.LogCaptureFixture, say: Callable[[Case], Opinion]) -> list[str]:
    with caplog.at_level(logging.WARNING, "openclaw_rl.judge.loop"):
        async with judging(book, Scripted(say), workers=8) as at_work:
            await all_judged(book)
            # A verdict is looked at after it is stored.
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
    assert f"To 40 of the last {COLLAPSE_WINDOW} turns the judge had nothing to say" in said[0]
    assert "custom: it is unclear" in said[0]


async def test_a_judge_that_tells_turns_apart_is_not_warned_of(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    ready(book, COLLAPSE_WINDOW + 5)
    assert await warnings(book, caplog, lambda case: Opinion(1.0 if case.turn % 3 else -1.0)) == []


async def test_a_few_equal_verdicts_are_no_reason_to_warn(book: Book, caplog: pytest.LogCaptureFixture) -> None:
    ready(book, COLLAPSE_WINDOW - 1)
    assert await warnings(book, caplog, lambda case: Opinion(1.0)) == []


async def test_a_judge_that_is_away_says_so_to_those_who_wait(book: Book) -> None:
    """Without a language model nothing is ever down."""
    async with judging(book, Scripted(lambda case: Opinion(1.0))) as at_work:
        assert at_work.down == ""


async def test_what_a_judge_that_is_down_answers_with_a_pause_is_heeded(book: Book) -> None:
    def say(case: Case) -> Opinion:
        if len(judge.asked) == 1:
            raise JudgeDown("busy", 0.2)
        return Opinion(1.0)

    judge = Scripted(say)
    ready(book)
    async with judging(book, judge):
        await all_judged(book)
    assert len(judge.asked) == 2

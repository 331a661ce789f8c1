"""Runs the judging loop on a ledger, with scripted judges or a judge behind an endpoint."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from openclaw_rl.judge.askers import AskParams, EndpointAsker
from openclaw_rl.judge.judges.base import Breaker, Case, Explicit, Judge, JudgePanel, Opinion, Questions
from openclaw_rl.judge.judges.llm import LlmJudge
from openclaw_rl.judge.loop import JudgeLoop, JudgeMetrics
from openclaw_rl.judge.teacher import NoteDistiller, Teacher
from openclaw_rl.ledger.turns import set_next_state
from openclaw_rl.types import Source
from support.judge_server import JudgeServer
from support.methods import a_method
from support.records import Book, a_turn

CAME = [{"role": "user", "content": "thank you"}]
HINT = "Give the distance in kilometres."


class ScriptedJudge:
    """A judge that answers with `say`, and records the turns it was asked about."""

    source = Source.CUSTOM
    down = None
    answered = 0

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
    """A running loop and its metrics."""

    def __init__(self, judging: JudgeLoop, registry: CollectorRegistry) -> None:
        self.loop, self.registry = judging, registry

    @property
    def down(self) -> str | None:
        return self.loop.down

    def metric(self, name: str) -> float:
        lines = generate_latest(self.registry).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))


@contextlib.asynccontextmanager
async def judging(
    book: Book,
    *judges: Judge,
    method: str = "rl",
    teacher: Teacher | None = None,
    workers: int = 4,
    judges_steps: bool = False,
    keeps_notes: bool = False,
    judge_reads_wishes: bool = False,
    distiller: NoteDistiller | None = None,
    first_pause: float = 0.02,
    idle_seconds: float = 5.0,
    **options: Any,
) -> AsyncIterator[Judging]:
    registry = CollectorRegistry()
    made = JudgeLoop(
        book.ledger,
        JudgePanel([Explicit(), *judges]),
        teacher,
        a_method(method, **options),
        JudgeMetrics(registry),
        workers=workers,
        judges_steps=judges_steps,
        keeps_notes=keeps_notes,
        judge_reads_wishes=judge_reads_wishes,
        distiller=distiller,
        first_pause=first_pause,
        idle_seconds=idle_seconds,
    )
    task = asyncio.create_task(made.run())
    try:
        yield Judging(made, registry)
        assert not task.done(), "it runs until it is cancelled"
    finally:
        task.cancel()
        async with asyncio.timeout(60):  # the loop must notice the cancellation at every point
            await asyncio.gather(task, return_exceptions=True)


def impatient() -> Breaker:
    """Pauses are what they are for people; tests need not wait so long."""
    return Breaker(first_pause=0.02, longest_pause=0.1)


@contextlib.asynccontextmanager
async def endpoint(
    server: JudgeServer, votes: int = 3, timeout: float = 20, breaker: Breaker | None = None
) -> AsyncIterator[LlmJudge]:
    asker = EndpointAsker(server.url, "judge-1")
    judge = LlmJudge(asker, AskParams(votes, 0.6, 100), timeout=timeout)
    judge.breaker = breaker or impatient()
    yield judge
    await asker.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def ready(book: Book, count: int = 1, **given: Any) -> list[int]:
    """Turns whose next state is known."""
    turns = [book.capture(a_turn(**given)) for _ in range(count)]
    for turn in turns:
        book.change(set_next_state, turn, CAME)
    return turns


def open_turns(book: Book) -> int:
    return int(book.scalar("SELECT count(*) FROM turns WHERE state = 'ready'"))


async def all_judged(book: Book) -> None:
    await until(lambda: not open_turns(book))


def score(book: Book, turn: int) -> float | None:
    verdict = book.read(turn).verdict
    return verdict.score if verdict else None

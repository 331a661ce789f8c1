"""Imported turns get the log-probs of the policy that serves, and wait for it while it cannot score."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from openclaw_rl.engines.base import EngineError, EngineUnavailable
from openclaw_rl.learn.samples import score_imported
from openclaw_rl.ledger.sessions import move
from openclaw_rl.types import ScoreRequest, State
from support.fakes import ScriptedSampler
from support.records import Book

SECONDS = 30


class Scorer(ScriptedSampler):
    """Gives every token the log-prob -0.5, unless an error is left to raise."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(lambda request, index: [1], scores=self.answer, versions=(1,))
        self.errors = list(errors)
        self.asked = asyncio.Event()

    def answer(self, request: ScoreRequest) -> list[float]:
        self.asked.set()
        if self.errors:
            raise self.errors.pop(0)
        return [-0.5] * request.last_n


@contextlib.asynccontextmanager
async def scoring(book: Book, sampler: Scorer, poll_seconds: float = 5.0) -> AsyncIterator[None]:
    task = asyncio.create_task(score_imported(book.ledger, sampler, batch_size=2, poll_seconds=poll_seconds))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_state(book: Book, turn: int, state: State) -> None:
    async with asyncio.timeout(SECONDS):
        while book.state(turn) is not state:
            await asyncio.sleep(0.002)


async def test_a_turn_is_scored_by_the_policy_that_serves(book: Book) -> None:
    turn = book.put(State.CAPTURED, response_ids=[4, 5, 6], logprobs=[])
    async with scoring(book, Scorer()):
        await until_state(book, turn, State.READY)
    assert (book.read(turn).logprobs, book.read(turn).version) == ([-0.5] * 3, 1)


async def test_without_turns_nothing_else_is_held_up_and_later_ones_are_scored(book: Book) -> None:
    async with scoring(book, Scorer(), poll_seconds=0.01):
        await asyncio.sleep(0)
        turn = book.put(State.CAPTURED, response_ids=[4, 5, 6], logprobs=[])
        await until_state(book, turn, State.READY)


async def test_an_engine_that_is_away_is_asked_again_only_after_a_pause(book: Book) -> None:
    turn = book.put(State.CAPTURED, response_ids=[4, 5, 6], logprobs=[])
    sampler = Scorer(*[EngineUnavailable("The worker starts again.")] * 3)
    async with scoring(book, sampler, poll_seconds=10 * SECONDS):
        await sampler.asked.wait()
        await asyncio.sleep(0.05)
        assert len(sampler.errors) == 2
        assert book.state(turn) is State.CAPTURED


async def test_a_turn_that_the_engine_refuses_is_dropped_with_the_reason(book: Book) -> None:
    turn = book.put(State.CAPTURED, response_ids=[4, 5, 6], logprobs=[])
    async with scoring(book, Scorer(EngineError("too long"))):
        await until_state(book, turn, State.DROPPED)
    assert book.read(turn).reason == "cannot be scored by the policy: too long"


async def test_turns_are_scored_shortly_before_their_step_so_that_none_is_stale(book: Book) -> None:
    turns = [book.put(State.CAPTURED, response_ids=[4, 5, 6], logprobs=[]) for _ in range(5)]
    async with scoring(book, Scorer(), poll_seconds=10 * SECONDS):
        await until_state(book, turns[1], State.READY)
        await asyncio.sleep(0.05)
        assert [book.state(turn) for turn in turns[2:]] == [State.CAPTURED] * 3, "two are enough for a step"
        # A verdict that gives nothing to train on makes room at once.
        await book.ledger.write(move, turns[0], State.DROPPED, "neutral")
        await until_state(book, turns[2], State.READY)
        await asyncio.sleep(0.05)
        assert book.state(turns[3]) is State.CAPTURED

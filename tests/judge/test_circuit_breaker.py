"""A judge that is down is left alone, and one trial at a time looks whether it is back."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from openclaw_rl.judge.judges.base import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Breaker, JudgeDown, JudgeFailed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def failing(error: Exception) -> Callable[[], Awaitable[str]]:
    async def ask() -> str:
        raise error

    return ask


async def answering() -> str:
    return "yes"


def refusing(asked: list[int]) -> Callable[[], Awaitable[str]]:
    """Notes that it was asked, though it should not have been."""

    async def ask() -> str:
        asked.append(1)
        return "yes"

    return ask


async def fail(breaker: Breaker, error: Exception, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(type(error)):
            await breaker.call(failing(error))


async def open_(breaker: Breaker) -> None:
    await fail(breaker, JudgeDown("away"), FAILURES)
    assert breaker.reason == "away"


async def test_a_few_failures_do_not_close_the_way(breaker: Breaker) -> None:
    await fail(breaker, JudgeDown("away"), FAILURES - 1)
    assert breaker.reason is None
    assert await breaker.call(answering) == "yes"
    await fail(breaker, JudgeDown("away"), FAILURES - 1)
    assert breaker.reason is None, "an answer between failures means that they are not in a row"


@pytest.mark.parametrize("error", [JudgeDown("away"), TimeoutError()])
async def test_failures_in_a_row_do(breaker: Breaker, error: Exception) -> None:
    await fail(breaker, error, FAILURES)
    assert breaker.reason == (str(error) or "the judge does not answer in time")
    assert breaker.wait == FIRST_PAUSE
    asked: list[int] = []
    with pytest.raises(JudgeDown, match=breaker.reason) as refusal:
        await breaker.call(refusing(asked))
    assert refusal.value.retry_after == FIRST_PAUSE
    assert not asked


async def test_after_the_pause_one_trial_passes_and_an_answer_opens_the_way(breaker: Breaker, clock: Clock) -> None:
    await open_(breaker)
    clock.now += FIRST_PAUSE
    assert breaker.wait == 0
    assert await breaker.call(answering) == "yes"
    assert breaker.reason is None
    assert await breaker.call(answering) == "yes"
    assert breaker.answered == 2


async def test_during_a_trial_others_are_refused(breaker: Breaker, clock: Clock) -> None:
    await open_(breaker)
    clock.now += FIRST_PAUSE
    gate = asyncio.Event()

    async def slow() -> str:
        await gate.wait()
        return "slow"

    trial = asyncio.create_task(breaker.call(slow))
    await asyncio.sleep(0)
    asked: list[int] = []
    with pytest.raises(JudgeDown):
        await breaker.call(refusing(asked))
    gate.set()
    assert await trial == "slow"
    assert not asked
    assert breaker.reason is None


async def test_a_trial_that_is_given_up_does_not_bar_the_next(breaker: Breaker, clock: Clock) -> None:
    await open_(breaker)
    clock.now += FIRST_PAUSE
    trial = asyncio.create_task(breaker.call(asyncio.Event().wait))
    await asyncio.sleep(0)
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    assert await breaker.call(answering) == "yes"
    with pytest.raises(ZeroDivisionError):
        await breaker.call(failing(ZeroDivisionError()))
    assert await breaker.call(answering) == "yes"


async def test_each_pause_is_twice_the_one_before_up_to_the_longest(breaker: Breaker, clock: Clock) -> None:
    await open_(breaker)
    pauses = [breaker.wait]
    for _ in range(8):
        clock.now += breaker.wait
        await fail(breaker, JudgeDown("still away"))
        pauses.append(breaker.wait)
    assert pauses == [min(LONGEST_PAUSE, FIRST_PAUSE * 2**n) for n in range(9)]
    assert breaker.reason == "still away"
    clock.now += LONGEST_PAUSE
    await breaker.call(answering)
    await open_(breaker)
    assert breaker.wait == FIRST_PAUSE, "after an answer pauses are short again"


async def test_requests_that_fail_together_are_one_failure_to_come_back_from(breaker: Breaker) -> None:
    """Eight were under way when the judge went away: the pause is the first one, not the sixth."""
    gate = asyncio.Event()

    async def cut_off() -> str:
        await gate.wait()
        raise JudgeDown("away")

    under_way = [asyncio.create_task(breaker.call(cut_off)) for _ in range(8)]
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*under_way, return_exceptions=True)
    assert all(isinstance(result, JudgeDown) for result in results)
    assert breaker.wait == FIRST_PAUSE


async def test_a_judge_that_says_when_to_come_back_is_left_alone_at_once_and_for_so_long(
    breaker: Breaker, clock: Clock
) -> None:
    await fail(breaker, JudgeDown("too many requests", 7))
    assert (breaker.reason, breaker.wait) == ("too many requests", 7)
    clock.now += 6.5
    with pytest.raises(JudgeDown):
        await breaker.call(answering)
    clock.now += 0.5
    assert await breaker.call(answering) == "yes"


async def test_a_judge_that_could_not_deal_with_a_turn_is_there(breaker: Breaker) -> None:
    await fail(breaker, JudgeDown("away"), FAILURES - 1)
    await fail(breaker, JudgeFailed("too long"), 5)
    await fail(breaker, JudgeDown("away"), FAILURES - 1)
    assert breaker.reason is None
    assert breaker.answered == 5

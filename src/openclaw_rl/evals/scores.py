"""What an evaluation finds out, in one shape for all, and how its cases are run."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CaseScore:
    """How one case went."""

    case: str
    passed: bool
    parts: Mapping[str, float]
    """From 0 to 1 each; empty when there was no reply to look at."""
    answer: str
    detail: str
    """Why it did not pass, in a sentence."""


@dataclass(frozen=True, slots=True)
class TaskScores:
    """How all cases of a task went, in the task's order."""

    task: str
    cases: tuple[CaseScore, ...]

    @property
    def pass_rate(self) -> float:
        return sum(case.passed for case in self.cases) / len(self.cases) if self.cases else 0.0

    def part_means(self) -> dict[str, float]:
        """The mean of each part; a case without a part counts as 0 in it."""
        names = dict.fromkeys(name for case in self.cases for name in case.parts)
        return {name: sum(case.parts.get(name, 0.0) for case in self.cases) / len(self.cases) for name in names}


OnCase = Callable[[CaseScore], None]


async def score_all(
    task: str,
    cases: Sequence[Case],
    score: Callable[[Case], Awaitable[CaseScore]],
    *,
    at_once: int,
    on_case: OnCase | None = None,
) -> TaskScores:
    """Score all cases as `side_by_side` does; `on_case` hears of each when it is done."""

    async def one(case: Case) -> CaseScore:
        scored = await score(case)
        if on_case is not None:
            on_case(scored)
        return scored

    return TaskScores(task, await side_by_side(cases, one, at_once))


async def side_by_side(
    cases: Sequence[Case], one: Callable[[Case], Awaitable[Result]], at_once: int
) -> tuple[Result, ...]:
    """The result of each case, in order, `at_once` at a time. The first error ends them all, and is raised as it is."""
    places = asyncio.Semaphore(at_once)

    async def in_place(case: Case) -> Result:
        async with places:
            return await one(case)

    tasks = [asyncio.create_task(in_place(case)) for case in cases]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

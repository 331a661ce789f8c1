"""The results of all evaluations in one format, and the function that runs their cases."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CaseScore:
    """The result of one case."""

    case: str
    passed: bool
    parts: Mapping[str, float]
    """From 0 to 1 each; empty if there was no reply."""
    answer: str
    detail: str
    """One sentence that says why the case did not pass."""


@dataclass(frozen=True, slots=True)
class TaskScores:
    """The results of all cases of a task, in the task's order."""

    task: str
    cases: tuple[CaseScore, ...]

    @property
    def pass_rate(self) -> float:
        return sum(case.passed for case in self.cases) / len(self.cases) if self.cases else 0.0

    def part_means(self) -> dict[str, float]:
        """The mean of each part. A case without the part counts as 0."""
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
    """Score all cases, `at_once` at a time, and call `on_case` after each."""

    async def one(case: Case) -> CaseScore:
        scored = await score(case)
        if on_case is not None:
            on_case(scored)
        return scored

    return TaskScores(task, await run_concurrently(cases, one, at_once))


async def run_concurrently(
    cases: Sequence[Case], one: Callable[[Case], Awaitable[Result]], at_once: int
) -> tuple[Result, ...]:
    """The result of each case, in order, `at_once` at a time. The first error cancels the rest and is raised."""
    slots = asyncio.Semaphore(at_once)

    async def in_slot(case: Case) -> Result:
        async with slots:
            return await one(case)

    tasks = [asyncio.create_task(in_slot(case)) for case in cases]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for unfinished in tasks:
            unfinished.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

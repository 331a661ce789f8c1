"""The results of all evaluations in one format: how cases are run, and how results are shown."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any, Protocol, TypeVar

from rich.table import Table

from openclaw_rl.aio import run_concurrently
from openclaw_rl.client import ServerError
from openclaw_rl.evals.chat import Chat, Reply, Tool
from openclaw_rl.lab.statistics import Difference, Interval, compare_passes, in_two_lines, proportion


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


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What one task asks of a model."""

    task: str
    size: int
    """The number of cases."""
    max_tokens: int
    """Longest answer: the measure of how long a case takes, compared with those of other tasks."""
    ask: Callable[[Chat, int, OnCase], Awaitable[TaskScores]]


def data_lines(name: str) -> list[dict[str, Any]]:
    """The lines of one of this package's files of cases."""
    text = resources.files("openclaw_rl.evals").joinpath("data", name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


class PromptCase(Protocol):
    """A case that is one question to the model."""

    @property
    def name(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def tools(self) -> Sequence[Tool]: ...


Asked = TypeVar("Asked", bound=PromptCase)


async def ask_all(
    task: str,
    chat: Chat,
    cases: Sequence[Asked],
    score: Callable[[Asked, Reply], Awaitable[CaseScore]],
    *,
    max_tokens: int,
    seed: int = 0,
    at_once: int = 4,
    on_case: OnCase | None = None,
) -> TaskScores:
    """Ask a model all cases, `at_once` at a time, and call `on_case` after each. The server records none of it.

    The answers are the most likely ones. A prompt that is too long for the model is a case that did not pass. Raises
    ServerError.
    """

    async def one(case: Asked) -> CaseScore:
        messages = [{"role": "user", "content": case.prompt}]
        settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "seed": seed, "keep": False}
        try:
            scored = await score(case, await chat.ask(messages, tools=case.tools, **settings))
        except ServerError as error:
            if not error.is_too_long:
                raise
            scored = CaseScore(case.name, False, {}, "", str(error))
        if on_case is not None:
            on_case(scored)
        return scored

    return TaskScores(task, await run_concurrently(cases, one, at_once))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The scores of every model on one task."""

    plan: EvalPlan
    scores: tuple[TaskScores | None, ...]
    """One of each model; None if none of its cases was asked."""

    @property
    def pair(self) -> tuple[TaskScores, TaskScores] | None:
        """The scores of two models that were asked every case, which can be compared."""
        whole = [scores for scores in self.scores if scores and len(scores.cases) == self.plan.size]
        return (whole[0], whole[1]) if len(whole) == 2 else None


def by_task(plans: Sequence[EvalPlan], results: Sequence[Sequence[TaskScores]]) -> list[TaskResult]:
    """The tasks that were begun. A task that was stopped has the cases that were done."""
    measured = [{scores.task: scores for scores in tasks} for tasks in results]
    lines = [TaskResult(plan, tuple(tasks.get(plan.task) for tasks in measured)) for plan in plans]
    return [line for line in lines if any(line.scores)]


def table(models: Sequence[str], results: Sequence[TaskResult]) -> Table:
    """One row per task and part; with two models also their difference and its p-value.

    Intervals are below the shares, so that the table fits a terminal of 80 columns.
    """
    scoreboard = Table(title="Share of cases passed (95 % interval)", title_justify="left")
    for heading in ("task", "cases", *models, *(("difference", "p") if len(models) == 2 else ())):
        # The name of a model is often a path, which is folded to the width of an interval.
        least = len("(0.00–1.00)") if heading in models else None
        scoreboard.add_column(heading, overflow="fold", min_width=least, no_wrap=heading not in ("cases", *models))
    for line in results:
        shares = [interval_of(scores) for scores in line.scores]
        cells = [line.plan.task, sizes(line), *(in_two_lines(one) if one else "–" for one in shares)]
        if len(models) == 2:
            change = difference(*line.pair) if line.pair else None
            cells += [in_two_lines(change), f"{change.p:.3f}"] if change else ["–", "–"]
        scoreboard.add_row(*cells)
        means = [scores.part_means() if scores else {} for scores in line.scores]
        for part in dict.fromkeys(name for mean in means for name in mean):
            scoreboard.add_row(
                f"  {part}", "", *(f"{mean[part]:.2f}" if part in mean else "–" for mean in means), style="dim"
            )
    return scoreboard


def sizes(line: TaskResult) -> str:
    """How many cases were asked; if some were not, of each model and of how many."""
    counts = [len(scores.cases) if scores else 0 for scores in line.scores]
    if all(count == line.plan.size for count in counts):
        return str(line.plan.size)
    return f"{' and '.join(map(str, counts))} of {line.plan.size}"


def interval_of(scores: TaskScores | None) -> Interval | None:
    """The share of passed cases, if one was asked. Each was asked once, so the cases count as independent."""
    if scores is None or not scores.cases:
        return None
    return proportion([case.passed for case in scores.cases])


def difference(model: TaskScores, other: TaskScores) -> Difference:
    """How much more the model passes than the other one."""
    return compare_passes([case.passed for case in other.cases], [case.passed for case in model.cases])


def results_data(models: Sequence[str], results: Sequence[TaskResult]) -> dict[str, Any]:
    """All results as data for JSON."""
    tasks = {}
    for line in results:
        by_model = {
            model: asdict(scores) | {"pass_rate": scores.pass_rate}
            for model, scores in zip(models, line.scores, strict=True)
            if scores
        }
        compared = {"difference": asdict(difference(*line.pair))} if line.pair else {}
        tasks[line.plan.task] = {"planned": line.plan.size, **by_model, **compared}
    return {"models": list(models), "tasks": tasks}

"""The results of `openclaw-rl eval` as a table and as data."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from openclaw_rl.evals.eval_tasks import EvalPlan
from openclaw_rl.evals.scores import TaskScores
from openclaw_rl.evals.statistics import Difference, compare_passes, proportion


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
    """One row per task and part; with two models also their difference and its p-value."""
    scoreboard = Table(title="Share of cases passed (95% interval)", title_justify="left")
    for heading in ("task", "cases", *models, *(("difference", "p") if len(models) == 2 else ())):
        scoreboard.add_column(heading)
    for line in results:
        cells = [line.plan.task, sizes(line), *map(share, line.scores)]
        if len(models) == 2:
            change = difference(*line.pair) if line.pair else None
            spans = f"{change.mean:+.2f} ({change.low:+.2f} – {change.high:+.2f})" if change else "–"
            cells += [spans, f"{change.p:.3f}" if change else "–"]
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


def share(scores: TaskScores | None) -> str:
    """The share of passed cases. Each case was asked once, so the cases count as independent."""
    if scores is None or not scores.cases:
        return "–"
    interval = proportion([case.passed for case in scores.cases])
    return f"{interval.mean:.2f} ({interval.low:.2f} – {interval.high:.2f})"


def difference(model: TaskScores, other: TaskScores) -> Difference:
    """How much more the model passes than the other one."""
    return compare_passes([case.passed for case in other.cases], [case.passed for case in model.cases])


def plain(models: Sequence[str], results: Sequence[TaskResult]) -> dict[str, Any]:
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

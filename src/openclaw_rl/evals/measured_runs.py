"""Adds what `openclaw-rl eval` measured to the runs whose checkpoints it measured."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from openclaw_rl.dashboard.evaluations import Evaluation, record_evaluations
from openclaw_rl.evals.eval_tasks import EvalPlan
from openclaw_rl.evals.flags import BASE
from openclaw_rl.evals.scores import TaskScores
from openclaw_rl.learn.checkpoints import FOLDER, RECORD
from openclaw_rl.models import read_json_object
from openclaw_rl.types import BASE_VERSION


def add_to_runs(
    measured: Mapping[str, Sequence[TaskScores]], plans: Sequence[EvalPlan], *, is_quick: bool
) -> list[Path]:
    """Add the tasks that were done to the run of each checkpoint, with those of the base model.

    Returns the run directories. One that cannot be written to is left out, and so is a task that was stopped.
    """
    sizes = {plan.task: plan.size for plan in plans}
    done = {model: [one for one in tasks if len(one.cases) == sizes[one.task]] for model, tasks in measured.items()}
    versions = {model: version_of(model) for model in measured}
    added = []
    for run_dir in sorted({place[0] for place in versions.values() if place}):
        lines = []
        for model, tasks in done.items():
            place = (run_dir, BASE_VERSION) if model == BASE else versions[model]
            if place and place[0] == run_dir:
                lines += [evaluation(place[1], scores, is_quick=is_quick) for scores in tasks]
        with contextlib.suppress(OSError):
            record_evaluations(run_dir, lines)
            added.append(run_dir)
    return added


def version_of(model: str) -> tuple[Path, int] | None:
    """The run directory that a checkpoint lies in, and its policy version; None if it lies elsewhere."""
    folder = Path(model).expanduser().resolve()
    if model == BASE or folder.parent.name != FOLDER or not (folder / RECORD).is_file():
        return None
    version = read_json_object(folder / RECORD).get("version")
    return (folder.parent.parent, version) if isinstance(version, int) else None


def evaluation(version: int, scores: TaskScores, *, is_quick: bool) -> Evaluation:
    what = f"{scores.task} (quick)" if is_quick else scores.task
    return Evaluation(version, what, sum(case.passed for case in scores.cases), len(scores.cases))

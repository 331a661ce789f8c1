"""`openclaw-rl eval`: measures what a model can do through the API, alone or compared with another model."""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from openclaw_rl import terminal
from openclaw_rl.config.options import ConfigError
from openclaw_rl.dashboard.evaluations import Evaluation, record_evaluations
from openclaw_rl.errors import UserError
from openclaw_rl.evals.arguments import BASE, TASKS, Machine
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.eval_tasks import PLANS
from openclaw_rl.evals.scores import CaseScore, EvalPlan, TaskScores, by_task, interval_of, results_data, table
from openclaw_rl.evals.screen import EvalProgress, TimeLeft
from openclaw_rl.lab.commands import check_writable, run_stoppable, write_text
from openclaw_rl.lab.server import run_server
from openclaw_rl.learn.checkpoints import FOLDER, RECORD
from openclaw_rl.models import adapter_rank, read_json_object
from openclaw_rl.types import BASE_VERSION


def evaluate(machine: Machine, options: argparse.Namespace) -> int:
    plans = [PLANS[name](options.quick) for name in chosen_tasks(options.eval_tasks)]
    models = [options.model_path, *([options.compare] if options.compare else [])]
    flags = [server_flags(machine, model) for model in models]
    if options.json:
        check_writable(options.json)
    console = terminal.console()
    console.print(announcement(plans, len(models)), highlight=False, soft_wrap=True)
    time_left = TimeLeft(len(models) * sum(plan.tokens for plan in plans))
    results: list[list[TaskScores]] = []

    async def measure_all() -> None:
        for model, model_flags in zip(models, flags, strict=True):
            results.append([])
            await measure(model_flags, plans, machine.seed, EvalProgress(console, model, time_left), results[-1])

    try:
        run_stoppable(measure_all(), console)
    finally:
        # Also after an error or Ctrl-C: what was measured may have taken many minutes.
        if measured := {model: tasks for model, tasks in zip(models, results, strict=False) if tasks}:
            finish(measured, plans, options.json, console)
            for run_dir in add_to_runs(measured, plans, is_quick=options.quick):
                console.print(f"Added to the page and the report of {run_dir}.", soft_wrap=True, highlight=False)
    return 0


def announcement(plans: Sequence[EvalPlan], models: int) -> str:
    """How many cases are asked, before the first one tells how long they take."""
    sizes = ", ".join(f"{plan.task} {plan.size}" for plan in plans)
    of_each = " of each of 2 models" if models == 2 else ""
    return f"Cases: {sizes}{of_each}. Ctrl-C stops and shows what was measured so far."


def finish(
    measured: Mapping[str, Sequence[TaskScores]], plans: Sequence[EvalPlan], path: Path | None, console: Console
) -> None:
    """Print the table of the models that were measured, and write the file if a path is given."""
    models, results = list(measured), by_task(plans, list(measured.values()))
    console.print(table(models, results))
    if path:
        write_text(path, json.dumps(results_data(models, results), indent=1) + "\n")
        console.print(f"Every case and answer: {path}")


def chosen_tasks(given: str) -> list[str]:
    names = [name for name in given.replace(",", " ").split() if name]
    if unknown := [name for name in names if name not in PLANS]:
        raise ConfigError(f"Unknown task {unknown[0]}: --eval-tasks takes some of {', '.join(TASKS)}.")
    if not names:
        raise ConfigError(f"--eval-tasks names no task: give some of {', '.join(TASKS)}.")
    return names


def server_flags(machine: Machine, model: str) -> tuple[str, ...]:
    """The options of a server for a checkpoint, a model folder or the base model. Raises UserError."""
    flags = ["--no-capture", "--max-steps", "0", *machine.flags, "--seed", str(machine.seed)]
    folder = Path(model).expanduser()
    if model != BASE and not (folder / "checkpoint.json").exists():
        if not (folder / "config.json").exists():
            raise UserError(f"{model} is neither a checkpoint nor a model folder. For the base model, give {BASE}.")
        return (*flags, "--resume-from-ckpt", "none", "--model-name", str(folder))
    if machine.model_name:
        flags += ["--model-name", machine.model_name]
    if model == BASE:
        return (*flags, "--resume-from-ckpt", "none")
    return (*flags, "--resume-from-ckpt", str(folder), "--lora-rank", str(adapter_rank(folder)))


async def measure(
    flags: Sequence[str], plans: Sequence[EvalPlan], seed: int, progress: EvalProgress, results: list[TaskScores]
) -> None:
    """Append the scores of one model on each task; if it is stopped, also those cases of a task that were done.

    Raises ServerFailed, ServerError.
    """
    with tempfile.TemporaryDirectory() as folder, progress:
        progress.begin("starting a server")
        async with run_server(Path(folder), *flags) as server, Chat(server.url) as chat:
            progress.log("server started")
            for plan in plans:
                advance = progress.begin(plan.task, plan.size, plan.max_tokens)
                done: list[CaseScore] = []

                def on_case(
                    case: CaseScore, done: list[CaseScore] = done, advance: Callable[[], None] = advance
                ) -> None:
                    done.append(case)
                    advance()

                scores = None
                try:
                    scores = await plan.ask(chat, seed, on_case)
                finally:
                    if done or scores:
                        results.append(scores or TaskScores(plan.task, tuple(done)))
                progress.log(f"{plan.task}: done, {interval_of(results[-1]) or '–'} of {plan.size}")


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

"""`openclaw-rl eval`: measures what a model can do through the API, alone or compared with another model."""

import argparse
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from openclaw_rl import terminal
from openclaw_rl.config.options import ConfigError
from openclaw_rl.dashboard.evaluations import Evaluation, record_evaluations
from openclaw_rl.errors import UserError
from openclaw_rl.evals.arguments import BASE, TASKS, Machine
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.eval_tasks import PLANS
from openclaw_rl.evals.items import ItemGroup, RunItem, run_items
from openclaw_rl.evals.scores import CaseScore, EvalPlan, TaskScores, by_task, interval_of, results_data, table
from openclaw_rl.lab.commands import LINE_INTERVAL, RunProgress, check_writable, write_text
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
    cases, tokens = sum(plan.size for plan in plans), sum(plan.size * plan.max_tokens for plan in plans)
    progress = RunProgress(console, "cases", len(models) * cases, len(models) * tokens)
    results: list[list[TaskScores]] = [[] for _ in models]
    groups = []
    for model, model_flags, scores in zip(models, flags, results, strict=True):
        asks = [(plan, partial(measure, model, plan, machine.seed, progress, scores)) for plan in plans]
        items = [RunItem((model, plan.task), ask, counts=True) for plan, ask in asks]
        groups.append(ItemGroup(items, partial(served, model, model_flags, progress)))

    def show() -> None:
        if measured := {model: tasks for model, tasks in zip(models, results, strict=True) if tasks}:
            finish(measured, plans, options.json, console)
            for run_dir in add_to_runs(measured, plans, is_quick=options.quick):
                console.print(f"Added to the page and the report of {run_dir}.", soft_wrap=True, highlight=False)

    run_items(groups, 1, progress, show)
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


@contextlib.asynccontextmanager
async def served(model: str, flags: Sequence[str], progress: RunProgress) -> AsyncIterator[Chat]:
    """A server for a model, as long as its tasks are asked. Raises ServerFailed."""
    with tempfile.TemporaryDirectory() as folder:
        progress.note(f"{model}: starting a server")
        progress.log(f"{model}: starting a server")
        async with run_server(Path(folder), *flags) as server, Chat(server.url) as chat:
            progress.log(f"{model}: server started")
            yield chat


async def measure(
    model: str, plan: EvalPlan, seed: int, progress: RunProgress, results: list[TaskScores], chat: Chat
) -> tuple[dict[str, Any], str]:
    """Append the scores of a model on a task; if it is stopped, those of the cases that were done.

    Raises ServerFailed, ServerError.
    """
    done: list[CaseScore] = []
    scores = None

    def on_case(case: CaseScore) -> None:
        done.append(case)
        progress.advance(f"{model}: {plan.task}", plan.max_tokens)
        if len(done) % LINE_INTERVAL == 0:
            progress.log(progress.with_time(f"{model}: {plan.task}: {len(done)} of {plan.size} cases"))

    try:
        scores = await plan.ask(chat, seed, on_case)
    finally:
        if done or scores:
            results.append(scores or TaskScores(plan.task, tuple(done)))
    return {}, f"{model}: {plan.task}: done, {interval_of(scores) or '–'} of {plan.size}"


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

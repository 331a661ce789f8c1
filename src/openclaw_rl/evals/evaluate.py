"""`openclaw-rl eval`: measures what a model can do through the API, alone or compared with another model."""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from openclaw_rl import terminal
from openclaw_rl.config.options import ConfigError
from openclaw_rl.dashboard.components.render import write
from openclaw_rl.errors import UserError
from openclaw_rl.evals import coding, tool_use
from openclaw_rl.evals.bfcl import bfcl_cases
from openclaw_rl.evals.chat import Chat, HttpChat
from openclaw_rl.evals.examination import ExamAnswer, examine
from openclaw_rl.evals.flags import BASE, TASKS
from openclaw_rl.evals.machine import Machine
from openclaw_rl.evals.personas.persona import BUILT_IN, load
from openclaw_rl.evals.questions import questions
from openclaw_rl.evals.scores import CaseScore, OnCase, TaskScores
from openclaw_rl.evals.screen import EvalProgress
from openclaw_rl.evals.server_process import run_server, stoppable
from openclaw_rl.evals.statistics import Difference, compare_passes, proportion
from openclaw_rl.models import adapter_rank

#: Longest answer in a conversation: detailed answers must fit.
MAX_ANSWER_TOKENS = 200

Task = Callable[[Chat, int, OnCase], Awaitable[TaskScores]]


async def conversation(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
    """Every persona's held-out questions, checked by its rules and the quality guard."""
    cases: list[CaseScore] = []
    for persona in map(load, BUILT_IN):
        held_out = questions(persona.name, "held-out", seed)
        score = partial(case_score, persona.name)

        def on_answer(answer: ExamAnswer, score: Callable[[ExamAnswer], CaseScore] = score) -> None:
            on_case(score(answer))

        answers = await examine(chat, persona, held_out, max_tokens=MAX_ANSWER_TOKENS, seed=seed, on_answer=on_answer)
        cases += map(score, answers)
    return TaskScores("conversation", tuple(cases))


def case_score(persona: str, answer: ExamAnswer) -> CaseScore:
    parts = {"rules": float(answer.keeps_rules), "sensible": float(not answer.faults)}
    case = f"{persona}: {answer.question.text}"
    return CaseScore(case, answer.passed, parts, answer.answer, ", ".join(answer.faults))


async def code(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
    return await coding.run(chat, seed=seed, on_case=on_case)


async def tools(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
    return await tool_use.run(chat, seed=seed, on_case=on_case)


async def bfcl(chat: Chat, seed: int, on_case: OnCase) -> TaskScores:
    return await tool_use.run(chat, cases=bfcl_cases(), seed=seed, on_case=on_case)


#: In the order of `TASKS`.
RUNS: dict[str, Task] = dict(zip(TASKS, (conversation, code, tools, bfcl), strict=True))


SIZES: dict[str, Callable[[], int]] = {
    "conversation": lambda: sum(len(questions(persona, "held-out")) for persona in BUILT_IN),
    "coding": lambda: len(coding.problems()),
    "tool-use": lambda: len(tool_use.cases()),
    "bfcl": lambda: len(bfcl_cases()),
}


def evaluate(machine: Machine, options: argparse.Namespace) -> int:
    names = chosen_tasks(options.eval_tasks)
    models = [options.model_path, *([options.compare] if options.compare else [])]
    flags = [server_flags(machine, model) for model in models]
    if options.json:
        check_writable(options.json)
    console = terminal.console()
    results: list[list[TaskScores]] = []
    try:
        with stoppable(console):
            for model, model_flags in zip(models, flags, strict=True):
                results.append(asyncio.run(measure(model_flags, names, machine.seed, EvalProgress(console, model))))
    finally:
        # Also after an error or Ctrl-C: the finished model may have taken many minutes.
        if results:
            finish(models[: len(results)], results, options.json, console)
    return 0


def finish(models: Sequence[str], results: Sequence[Sequence[TaskScores]], path: Path | None, console: Console) -> None:
    """Print the table, and write the file if a path is given."""
    console.print(table(models, results))
    if path:
        write(path, json.dumps(plain(models, results), indent=1) + "\n")
        console.print(f"Every case and answer: {path}")


def chosen_tasks(given: str) -> list[str]:
    names = [name for name in given.replace(",", " ").split() if name]
    if unknown := [name for name in names if name not in RUNS]:
        raise ConfigError(f"Unknown task {unknown[0]}: --eval-tasks takes some of {', '.join(TASKS)}.")
    if not names:
        raise ConfigError(f"--eval-tasks names no task: give some of {', '.join(TASKS)}.")
    if "bfcl" in names:
        bfcl_cases()
    return names


def check_writable(path: Path) -> None:
    """Check that a file can be written before anything is measured, without changing it. Raises UserError."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
    if is_new:
        path.resolve().unlink()


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


async def measure(flags: Sequence[str], names: Sequence[str], seed: int, progress: EvalProgress) -> list[TaskScores]:
    """The scores of one model on all tasks. Raises ServerFailed, ChatFailed."""
    with tempfile.TemporaryDirectory() as folder, progress:
        progress.begin("starting a server")
        async with run_server(Path(folder), *flags) as server, HttpChat(server.url, local=True) as chat:
            progress.log("server started")
            results = []
            for name in names:
                advance = progress.begin(name, SIZES[name]())

                def on_case(_: CaseScore, advance: Callable[[], None] = advance) -> None:
                    advance()

                results.append(await RUNS[name](chat, seed, on_case))
                progress.log(f"{name}: done, {share(results[-1])} of {len(results[-1].cases)}")
            return results


def table(models: Sequence[str], results: Sequence[Sequence[TaskScores]]) -> Table:
    """One row per task and part; with two models also their difference and its p-value."""
    scoreboard = Table(title="Share of cases passed (95% interval)", title_justify="left")
    for heading in ("task", "cases", *models, *(("difference", "p") if len(models) == 2 else ())):
        scoreboard.add_column(heading)
    for scores in zip(*results, strict=True):
        cells = [scores[0].task, str(len(scores[0].cases)), *map(share, scores)]
        if len(scores) == 2:
            change = difference(*scores)
            cells += [f"{change.mean:+.2f} ({change.low:+.2f} – {change.high:+.2f})", f"{change.p:.3f}"]
        scoreboard.add_row(*cells)
        means = [task.part_means() for task in scores]
        for part in means[0]:
            scoreboard.add_row(f"  {part}", "", *(f"{mean.get(part, 0.0):.2f}" for mean in means), style="dim")
    return scoreboard


def share(scores: TaskScores) -> str:
    """The share of passed cases. Each case was asked once, so the cases count as independent."""
    if not scores.cases:
        return "–"
    interval = proportion([case.passed for case in scores.cases])
    return f"{interval.mean:.2f} ({interval.low:.2f} – {interval.high:.2f})"


def difference(model: TaskScores, other: TaskScores) -> Difference:
    """How much more the model passes than the other one."""
    return compare_passes([case.passed for case in other.cases], [case.passed for case in model.cases])


def plain(models: Sequence[str], results: Sequence[Sequence[TaskScores]]) -> dict[str, Any]:
    """All results as data for JSON."""
    tasks = {}
    for scores in zip(*results, strict=True):
        by_model = {
            model: asdict(task) | {"pass_rate": task.pass_rate} for model, task in zip(models, scores, strict=True)
        }
        tasks[scores[0].task] = by_model | ({"difference": asdict(difference(*scores))} if len(scores) == 2 else {})
    return {"models": list(models), "tasks": tasks}

"""`openclaw-rl demo`: simulated people teach the embedded model what they like, while you watch."""

import argparse
import asyncio
import contextlib
import csv
import itertools
import json
import math
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from openclaw_rl import __version__, terminal
from openclaw_rl.aio import run_concurrently
from openclaw_rl.client import ServerError
from openclaw_rl.config.general import PERSONAL
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.engines.factory import Resources
from openclaw_rl.errors import UserError
from openclaw_rl.evals.arguments import METHODS, USER_KEY, Machine
from openclaw_rl.evals.examination import ExamAnswer, judge
from openclaw_rl.evals.items import ItemGroup, RunItem, run_items
from openclaw_rl.evals.page import libraries, save_curve, write_page
from openclaw_rl.evals.personas.persona import BUILT_IN, load
from openclaw_rl.evals.screen import Screen
from openclaw_rl.evals.summary import Summary, exams, summarise
from openclaw_rl.evals.trial import Exam, TrialOutcome, TrialPlan, run
from openclaw_rl.evals.wishes.wish import load as load_wish
from openclaw_rl.http_client import text_without_accounts
from openclaw_rl.lab.commands import first, run_stoppable
from openclaw_rl.lab.server import ServerFailed
from openclaw_rl.lab.statistics import RUN, Interval
from openclaw_rl.ledger.errors import NoLedger
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.status import words_not_understood
from openclaw_rl.methods.registry import find_method
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import ScoreRequest

#: The server's options in a demo: what `make run` has, with less memory and more checkpoints. Options after `--` come
#: later and override these.
SERVER_FLAGS = ("--preset", PERSONAL, "--kv-cache-gib", "1", "--save-interval", "8")
#: Where a demo is written without `--out`.
DEFAULT_OUT = Path("runs/demo")
#: The number of policy versions between two examinations. Practice makes more of them in the same time.
EXAM_EVERY, EXAM_EVERY_PRACTISED = 4, 8
#: Answers scored at the same time, and the size of the cache for their keys and values.
MAX_CONCURRENT_ANSWERS, CACHE_GIB = 8, 1.0


def demo(machine: Machine, options: argparse.Namespace) -> int:
    console = terminal.console()
    out = options.out or free_folder()
    plans = make_plans(machine, options, out)
    folder = machine.fetch_model()
    outcomes: list[TrialOutcome] = []
    failed: list[TrialPlan] = []
    screen = Screen(console, len(plans))

    async def measure(plan: TrialPlan, _: None) -> tuple[dict[str, Any], str]:
        # Added when it begins, so that a trial that is stopped has an outcome.
        outcomes.append(outcome := TrialOutcome(plan))
        try:
            await run(outcome, screen)
        except* (ServerFailed, ServerError) as errors:
            outcomes.remove(outcome)
            failed.append(plan)
            screen.failed(plan, str(first(errors)))
        else:
            screen.ended(plan)
        return {}, ""

    def show() -> None:
        if examined := [outcome for outcome in outcomes if outcome.exams]:
            examined.sort(key=lambda outcome: plans.index(outcome.plan))
            finish(examined, out, command_line(machine, options), machine, folder, console)

    items = [RunItem((plan.run_dir.name,), partial(measure, plan)) for plan in plans]
    run_items([ItemGroup(items, contextlib.nullcontext)], options.at_once, screen, show)
    return 1 if failed else 0


def finish(
    outcomes: Sequence[TrialOutcome], out: Path, command: str, machine: Machine, model: Path, console: Console
) -> None:
    """Write the demo's files and print its table."""
    try:
        message = "Asking the base model how probable the answers are (Ctrl-C skips this) …"
        if not console.is_terminal:
            console.print(message)
        with console.status(message):
            run_stoppable(add_perplexity(outcomes, machine, model), console)
    except EngineError as error:
        console.print(f"The base model could not score the answers: {error}", markup=False)
    write_results(outcomes, out, command, machine.policy_name)
    console.print(table(summarise(outcomes)))
    for outcome in outcomes:
        practice = f"{outcome.practice}." if outcome.practice else ""
        for said in filter(None, (practice, not_trained(outcome), not_understood(outcome.plan))):
            console.print(f"{outcome.plan.run_dir.name}: {said}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"Picture: {out / 'curve.svg'}   Page: {out / 'index.html'}", soft_wrap=True)
    console.print(f"Numbers: {out / 'curves.csv'}   Every answer: {out / 'results.json'}", soft_wrap=True)


def not_trained(outcome: TrialOutcome) -> str:
    """That no step was made, or that turns wait for one, and what to do; empty if all that was said was learned."""
    if not outcome.is_complete or outcome.practice:
        return ""
    made_none = "" if outcome.exams[-1].version else "No training step was made, so nothing has changed. "
    left = f"{outcome.left}. " if outcome.left else ""
    return made_none + left and f"{made_none}{left}Give it more --minutes and --sessions, or a smaller -- --batch-size."


def not_understood(plan: TrialPlan) -> str:
    """That the judge's rules did not understand most of what the person said, with examples; empty if they did."""
    try:
        with open_ledger(plan.run_dir) as db:
            return words_not_understood(db)
    except NoLedger:
        return ""


def free_folder() -> Path:
    """The first of runs/demo, runs/demo-2, … that does not exist."""
    names = (DEFAULT_OUT.with_name(f"{DEFAULT_OUT.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([DEFAULT_OUT], names) if not folder.exists())


def make_plans(machine: Machine, options: argparse.Namespace, out: Path) -> list[TrialPlan]:
    """The plan of every trial. Raises UserError."""
    if options.minutes <= 0 or min(options.sessions, options.seeds, options.at_once) < 1:
        raise ConfigError("--minutes, --sessions, --seeds and --at-once must be above 0.")
    if bool(options.user_base_url) != bool(options.user_model):
        raise ConfigError("--user-base-url and --user-model must be given together, or neither.")
    methods = METHODS if options.methods == "all" else (options.methods,)
    wish = load_wish(options.wish) if options.wish else None
    names = BUILT_IN if options.persona == "all" else (options.persona,)
    personas = [wish.persona] if wish else [load(name) for name in names]
    plans = []
    for method in methods:
        find_method(method)
    seeds = range(machine.seed, machine.seed + options.seeds)
    for persona, method, seed in itertools.product(personas, methods, seeds):
        run_dir = out / f"{Path(method).name}-{persona.name}-{seed}"
        if run_dir.exists():
            raise UserError(f"{run_dir} exists already: remove it or give another --out.")
        plans.append(
            TrialPlan(
                method,
                persona,
                seed,
                run_dir,
                options.sessions,
                options.minutes,
                (*machine.model_flags, *SERVER_FLAGS, *options.server),
                user_url=options.user_base_url,
                user_model=options.user_model,
                user_key=os.environ.get(USER_KEY, ""),
                wish=wish,
                exam_every=EXAM_EVERY_PRACTISED if wish else EXAM_EVERY,
            )
        )
    return plans


def write_results(outcomes: Sequence[TrialOutcome], out: Path, command: str, model: str) -> None:
    """Write the picture, the page and all numbers."""
    save_curve(outcomes, out / "curve.svg")
    write_page(outcomes, out / "index.html", command, model)
    trials = [trial_data(outcome) for outcome in outcomes]
    results = {"command": command, "model": model, **ran_on(), "trials": trials}
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    write_curves(outcomes, out / "curves.csv")


def ran_on() -> dict[str, Any]:
    """This program, its libraries and the hardware."""
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    hardware = {"machine": platform.machine(), "cpu": cpu_model(), "cores": os.cpu_count(), "gpus": gpus}
    return {"version": __version__, "commit": commit(), "libraries": libraries(), "hardware": hardware}


def cpu_model() -> str:
    """The processor's name, where the system tells it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor()


def commit() -> str | None:
    """The commit of this program, with "-dirty" if files have changed since; None if it is not run from a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["describe", "--always", "--dirty"]):
        try:
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
    return done.stdout.strip()


def write_curves(outcomes: Sequence[TrialOutcome], path: Path) -> None:
    """Write a line for each examination."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(
            ("persona", "method", "seed", "notes", "version", "minutes", "sessions", "answers", "as_wanted", "sensible")
        )
        for outcome in outcomes:
            plan = outcome.plan
            held = [(exam, "no") for exam in exams(outcome)]
            for exam, notes in [*held, (outcome.noted, "yes")] if outcome.noted else held:
                place = (exam.version, round(exam.seconds / 60, 3), exam.sessions, len(exam.answers))
                shares = (round(exam.adherence, 4), round(exam.quality, 4))
                lines.writerow((plan.persona.name, plan.method, plan.seed, notes, *place, *shares))


def trial_data(outcome: TrialOutcome) -> dict[str, Any]:
    """A trial as data for JSON."""
    plan = outcome.plan
    return {
        "method": plan.method,
        "persona": plan.persona.name,
        "seed": plan.seed,
        "settings": list(map(text_without_accounts, plan.flags)),
        "complete": outcome.is_complete,
        "first_replies": outcome.first_replies,
        "exams": [exam_data(exam) for exam in outcome.exams],
        **({"with_notes": exam_data(outcome.noted)} if outcome.noted else {}),
    }


def exam_data(exam: Exam) -> dict[str, Any]:
    return {
        "version": exam.version,
        "seconds": round(exam.seconds, 1),
        "sessions": exam.sessions,
        "adherence": exam.adherence,
        "answers": [{**asdict(answer), "passed": answer.passed} for answer in exam.answers],
    }


def command_line(machine: Machine, options: argparse.Namespace) -> str:
    """The command that repeats this demo, without the passwords of URLs."""
    person = ["--wish", options.wish] if options.wish else ["--persona", options.persona]
    words = ["openclaw-rl", "demo", "--method", options.methods, *person]
    words += ["--minutes", f"{options.minutes:g}", "--sessions", str(options.sessions), "--seeds", str(options.seeds)]
    # The server's options that `demo` also takes, where they differ from the defaults.
    words += machine.typed
    if options.at_once > 1:
        words += ["--at-once", str(options.at_once)]
    if options.user_base_url:
        words += ["--user-base-url", options.user_base_url, "--user-model", options.user_model]
    words += ["--", *options.server] if options.server else []
    return shlex.join(map(text_without_accounts, words))


def table(summaries: Sequence[Summary]) -> Table:
    """The demo's results. Each row has two lines, so that the table fits a terminal of 80 columns."""
    results = Table(title="Unseen questions answered as wanted, in % (95 % interval)", title_justify="left")
    noted = any(line.with_notes for line in summaries)
    headings = ("persona,\nmethod", "before", "after", *(["with\nnotes"] if noted else []), "sensible\nanswers")
    for heading in headings:
        results.add_column(heading, no_wrap=True)
    results.add_column(f"sessions until\n{RUN} in a row")
    results.add_column("min", no_wrap=True)
    for line in summaries:
        results.add_row(
            f"{line.persona}\n{line.method}",
            share(line.before),
            share(line.after),
            *([share(line.with_notes)] if noted else []),
            share(line.quality_after),
            str(line.until or ""),
            f"{line.minutes:.1f}",
            end_section=True,
        )
    return results


def share(interval: Interval | None) -> str:
    if interval is None:
        return "–"
    return f"{100 * interval.mean:.0f}\n({100 * interval.low:.0f}–{100 * interval.high:.0f})"


async def add_perplexity(outcomes: Sequence[TrialOutcome], machine: Machine, folder: Path) -> None:
    """Check the answers of all examinations again, now with their perplexity under the base model."""
    settings = machine.settings.for_few_sequences(MAX_CONCURRENT_ANSWERS, 0, CACHE_GIB)
    async with contextlib.AsyncExitStack() as stack:
        sampler = machine.sampler.open(settings, Resources(stack), folder, machine.policy_name)
        stack.push_async_callback(sampler.close)
        await sampler.start()
        renderer = await asyncio.to_thread(ChatRenderer, folder)

        async def with_perplexity(outcome: TrialOutcome, exam: Exam) -> Exam:
            async def one(answer: ExamAnswer) -> ExamAnswer:
                value = await perplexity(sampler, renderer, answer)
                return judge(outcome.plan.persona, answer.question, answer.answer, value)

            return replace(exam, answers=await run_concurrently(exam.answers, one, MAX_CONCURRENT_ANSWERS))

        for outcome in outcomes:
            outcome.exams[:] = [await with_perplexity(outcome, exam) for exam in outcome.exams]
            if outcome.noted is not None:
                outcome.noted = await with_perplexity(outcome, outcome.noted)


async def perplexity(sampler: Sampler, renderer: ChatRenderer, answer: ExamAnswer) -> float | None:
    """The perplexity of an answer; None if it is empty or cannot be scored."""
    prompt = renderer.prompt(renderer.text([{"role": "user", "content": answer.question.text}])).ids
    ids = renderer.tokenizer.encode_text(answer.answer)
    if not ids:
        return None
    try:
        scores = await sampler.score(ScoreRequest([*prompt, *ids], len(ids)))
    except EngineError:
        return None
    return math.exp(-sum(scores.logprobs) / len(ids))

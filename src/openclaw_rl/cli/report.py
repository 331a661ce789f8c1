"""`openclaw-rl report`: write a page about a run."""

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_rl.app.config import Config
from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from openclaw_rl.dashboard.answers import Compared
    from openclaw_rl.dashboard.run import Run
    from openclaw_rl.dashboard.source import RunSource

TEMPLATE = "dashboard/report.html.j2"
NAME = "report.html"


DOC = "write a page about a run: curves, verdicts, turns token by token, answers before and after"


def add(commands: Any) -> None:
    model = ("model_name", "cache_dir", "device", "dtype", "method")
    parser = add_command(commands, "report", DOC, run, (*RUN_OPTIONS, *model))
    parser.add_argument("run_dir", nargs="?", default=argparse.SUPPRESS, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where to write it (default: RUN_DIR/report.html)"
    )
    parser.add_argument(
        "--no-answers", action="store_true", help="load no model, and leave out the answers before and after"
    )


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.client import ready_state
    from openclaw_rl.dashboard.components.charts import need_matplotlib
    from openclaw_rl.dashboard.components.render import write
    from openclaw_rl.dashboard.run import read_run
    from openclaw_rl.ledger.lock import server_url
    from openclaw_rl.terminal import console

    config = run_config(options)
    need_matplotlib("openclaw-rl report")
    folder, source = config.run.folder, source_of(config)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give the run directory of a server.")
    if not may_be_run(source):
        raise UserError(f"There is no ledger in {config.ledger_dir}: give the run directory of a server.")
    server = server_url(folder)
    recorded = read_run(source, server, ready_state(server) if server else {})
    out = options.out or folder / NAME
    write(out, page(source, recorded, answers=not options.no_answers))
    console().print(f"The report is in {out}", markup=False, soft_wrap=True)
    return 0


def source_of(config: Config) -> "RunSource":
    from openclaw_rl.dashboard.source import RunSource

    return RunSource(
        run_dir=config.run.folder,
        ledger_dir=config.ledger_dir,
        checkpoints=config.checkpoints,
        model_name=config.model.model_name,
        method=config.learning_method,
        sampler=config.sampler,
        settings=config.engine_settings,
    )


def may_be_run(source: "RunSource") -> bool:
    """Whether a folder holds something of a run, or nothing else yet; a page is not written beside other things."""
    from openclaw_rl.dashboard.metrics import FILE as METRICS
    from openclaw_rl.ledger.lock import FILE as SERVER
    from openclaw_rl.ledger.schema import FILE as LEDGER

    folder = source.run_dir
    marks = (source.ledger_dir / LEDGER, folder / SERVER, folder / METRICS)
    others = (path for path in folder.iterdir() if path.name != NAME)
    return any(mark.is_file() for mark in marks) or not any(others)


def page(source: "RunSource", run: "Run", *, answers: bool = True) -> str:
    """The page's text; with `answers`, both models are asked first, which takes a while."""
    from openclaw_rl.dashboard import metrics, verdict_mix
    from openclaw_rl.dashboard.components.render import render
    from openclaw_rl.dashboard.examples import TITLES, make_example

    model, no_model = model_folder(source, run)
    tokenizer, no_tokens = read_tokenizer(model) if model else (None, no_model)
    compared, no_answers = ask(source, run, model) if answers else ([], "They were not asked for (--no-answers).")
    return render(
        TEMPLATE,
        run=run,
        status=run.status,
        method=source.method.name,
        curves=metrics.pictures(run.metrics.steps),
        mix=verdict_mix.pictures(run.verdicts),
        not_judged=verdict_mix.NOT_JUDGED,
        examples=[make_example(TITLES[kind], turn, tokenizer, source.method) for kind, turn in run.examples],
        no_tokens=no_tokens,
        compared=compared,
        no_answers=no_answers or no_model,
        now=time.time(),
    )


def model_folder(source: "RunSource", run: "Run") -> tuple[Path | None, str]:
    """Where the run's model is on this machine, or why it is not; nothing is fetched for a report."""
    from openclaw_rl.models import ModelNotFound, find_model

    try:
        found = find_model(run.model, source.settings.cache)
    except ModelNotFound as error:
        return None, str(error)
    return found, "" if found else f"The model {run.model} is not on this machine; --model-name says where it is."


def read_tokenizer(folder: Path) -> "tuple[Tokenizer | None, str]":
    from openclaw_rl.rendering.tokenizer import BadModelFolder, ChatTokenizer

    try:
        return ChatTokenizer(folder).backend, ""
    except BadModelFolder as error:
        return None, str(error)


def ask(source: "RunSource", run: "Run", model: Path | None) -> "tuple[list[Compared], str]":
    """Answers of the base model and of the newest checkpoint, or why there are none."""
    if model is None:
        return [], ""
    if not run.prompts:
        return [], "No conversation has been recorded, so there is nothing to ask."
    checkpoint = source.checkpoints.latest()
    if checkpoint is None:
        return [], "There is no checkpoint yet: one is saved every --save-interval steps, and when the server stops."
    from openclaw_rl.dashboard.answers import NoAnswers, compare
    from openclaw_rl.terminal import progress

    with contextlib.suppress(KeyboardInterrupt), progress() as shown:
        task = shown.add_task("Asking both models (Ctrl-C leaves it out)", total=2 * len(run.prompts))
        try:
            return compare(source, model, checkpoint, run.prompts, lambda: shown.advance(task)), ""
        except NoAnswers as error:
            return [], str(error)
    return [], "Asking them was broken off."

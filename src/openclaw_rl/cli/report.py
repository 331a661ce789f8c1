"""`openclaw-rl report`: write a page about a run."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openclaw_rl.app.config import Config
from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, add_command, add_line_flag, run_config
from openclaw_rl.client import ready_state
from openclaw_rl.errors import UserError
from openclaw_rl.lab.commands import write_text
from openclaw_rl.learn.checkpoints import line_folder
from openclaw_rl.ledger.run_dir import server_url
from openclaw_rl.terminal import say

if TYPE_CHECKING:
    from openclaw_rl.dashboard.run import RunSource

DOC = "write a page about a run: curves, verdicts, turns token by token, answers before and after"


def add(commands: Any) -> None:
    model = ("model_name", "trust_remote_code", "cache_dir", "device", "dtype", "method")
    parser = add_command(commands, "report", DOC, run, (*RUN_OPTIONS, *model, *KEY_OPTIONS))
    parser.usage = "openclaw-rl report [options] [RUN_DIR]"
    parser.add_argument("run_dir", nargs="?", default=argparse.SUPPRESS, metavar="RUN_DIR", help="the run's directory")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.html", help="where to write it (default: RUN_DIR/report.html)"
    )
    parser.add_argument(
        "--no-answers", action="store_true", help="load no model, and leave out the answers before and after"
    )
    add_line_flag(parser)


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.dashboard.report import NAME, may_be_run, page
    from openclaw_rl.dashboard.run import read_run

    config = run_config(options)
    folder = config.run.folder
    source = source_of(config, options.line)
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}: give the run directory of a server.")
    if not may_be_run(source):
        raise UserError(f"There is no ledger in {config.ledger_dir}: give the run directory of a server.")
    server = server_url(folder)
    recorded = read_run(source, server, ready_state(server, config.server.operator_key) if server else {})
    out = options.out or line_folder(folder, options.line) / NAME
    write_text(out, page(source, recorded, answers=not options.no_answers))
    say(f"The report is in {out}")
    if recorded.damage:
        raise UserError(f"The page lacks what the ledger recorded. {recorded.damage}")
    return 0


def source_of(config: Config, line: str) -> "RunSource":
    from openclaw_rl.dashboard.run import RunSource

    return RunSource(
        run_dir=config.run.folder,
        ledger_dir=config.ledger_dir,
        checkpoints=config.checkpoints_of(line),
        model_name=config.model.model_name,
        method=config.learning_method,
        settings=config.engine_settings,
        line=line,
    )

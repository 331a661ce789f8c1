"""`openclaw-rl import`: read sessions from a trajectories file into the ledger."""

import argparse
import sys
from pathlib import Path
from typing import Any

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console, printable

DOC = "read sessions from a trajectories file"


def add(commands: Any) -> None:
    parser = add_command(commands, "import", DOC, run, (*RUN_OPTIONS, "model_name", "cache_dir"))
    parser.add_argument("file", type=Path, metavar="IN.jsonl", help="one session per line, as export writes it")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.assembly import fetch_files
    from openclaw_rl.ledger.schema import open_ledger
    from openclaw_rl.ledger.status import plural
    from openclaw_rl.ledger.trajectories import import_file
    from openclaw_rl.rendering.chat import ChatRenderer

    if not options.file.is_file():
        raise UserError(f"There is no file {options.file}.")
    config = run_config(options)
    renderer = ChatRenderer(fetch_files(config))
    with open_ledger(config.ledger_dir, create_missing=True) as db:
        result = import_file(db, options.file, renderer)
    for refused in result.errors:
        sys.stderr.write(printable(refused) + "\n")
    known = f", {plural(result.known, 'was', 'were')} there already" if result.known else ""
    bad = plural(len(result.errors), "line", "lines")
    console().print(f"{plural(result.turns, 'turn', 'turns')} imported{known}, {bad} refused")
    return 1 if result.errors else 0

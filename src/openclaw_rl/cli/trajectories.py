"""`openclaw-rl export` and `import`: write what is recorded to a file, and read sessions from one into the ledger."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.errors import DamagedTurn
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.terminal import console, plural, printable, progress, say

IMPORT_DOC = "read sessions from a file of trajectories or conversations"


def add(commands: Any) -> None:
    add_export(commands)
    add_import(commands)


def add_export(commands: Any) -> None:
    parser = add_command(commands, "export", "write what is recorded to a file", run_export, RUN_OPTIONS)
    parser.add_argument("file", type=Path, metavar="OUT.jsonl", help="the file to write")
    parser.add_argument(
        "--format",
        choices=("trajectories", "jsonl"),
        default="trajectories",
        help="trajectories: one session per line as text; jsonl: one turn per line with tokens and log-probs "
        "(default: trajectories)",
    )


def run_export(options: argparse.Namespace) -> int:
    from openclaw_rl.ledger.packing import pack_json
    from openclaw_rl.ledger.trajectories import export_trajectories, export_turns

    in_words = options.format == "trajectories"
    count, damaged = 0, list[DamagedTurn]()
    with open_ledger(run_config(options).ledger_dir) as db, writable(options.file) as out, progress() as shown:
        lines = export_trajectories(db, damaged) if in_words else export_turns(db, damaged)
        for line in shown.track(lines, description="Exporting", total=None):
            out.write(pack_json(line) + "\n")
            count += 1
    written = plural(count, "session", "sessions") if in_words else plural(count, "turn", "turns")
    say(f"{written} written to {options.file}")
    for error in damaged:
        sys.stderr.write(printable(f"Left out: {error}.") + "\n")
    return 1 if damaged else 0


@contextlib.contextmanager
def writable(path: Path) -> Iterator[TextIO]:
    """A file to write to. Raises UserError if it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as out:
            yield out
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def add_import(commands: Any) -> None:
    parser = add_command(commands, "import", IMPORT_DOC, run_import, (*RUN_OPTIONS, "model_name", "cache_dir"))
    parser.add_argument(
        "file", type=Path, metavar="IN.jsonl", help='one session per line, as export writes it or as {"messages": […]}'
    )


def run_import(options: argparse.Namespace) -> int:
    from openclaw_rl.app.assembly import fetch_files
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

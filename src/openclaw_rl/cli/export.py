"""`openclaw-rl export`: write what is recorded to a file."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console, progress


def add(commands: Any) -> None:
    parser = add_command(commands, "export", "write what is recorded to a file", run, RUN_OPTIONS)
    parser.add_argument("file", type=Path, metavar="OUT.jsonl", help="the file to write")
    parser.add_argument(
        "--format",
        choices=("trajectories", "jsonl"),
        default="trajectories",
        help="trajectories: one session per line as text; jsonl: one turn per line with tokens and log-probs "
        "(default: trajectories)",
    )


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.ledger.packing import pack_json
    from openclaw_rl.ledger.schema import open_ledger
    from openclaw_rl.ledger.status import plural
    from openclaw_rl.ledger.trajectories import export_trajectories, export_turns

    in_words = options.format == "trajectories"
    count = 0
    with open_ledger(run_config(options).ledger_dir) as db, writable(options.file) as out, progress() as shown:
        lines = export_trajectories(db) if in_words else export_turns(db)
        for line in shown.track(lines, description="Exporting", total=None):
            out.write(pack_json(line) + "\n")
            count += 1
    written = plural(count, "session", "sessions") if in_words else plural(count, "turn", "turns")
    console().print(Text(f"{written} written to {options.file}"), soft_wrap=True)
    return 0


@contextlib.contextmanager
def writable(path: Path) -> Iterator[TextIO]:
    """A file to write to. Raises UserError if it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as out:
            yield out
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None

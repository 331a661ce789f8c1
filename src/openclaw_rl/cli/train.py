"""`openclaw-rl train`: trajectories in, a checkpoint out, without serving."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.api.options import ServerOptions
from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli.parser import add_command, load_options, positive
from openclaw_rl.cli.serve import show
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console, printable
from openclaw_rl.types import State

if TYPE_CHECKING:
    from openclaw_rl.app.train import TrainingResult

DOC = "train on files of trajectories and save a checkpoint, without serving"
#: Exit status if lines of a file were refused or turns were left.
UNFINISHED = 1


def add(commands: Any) -> None:
    # Another run is given in the place of a file.
    of_server = {*ServerOptions.model_fields, "continue_from"}
    parser = add_command(commands, "train", DOC, run, [name for name in FIELDS if name not in of_server])
    parser.usage = "openclaw-rl train [options] DATA.jsonl [DATA.jsonl ...]"
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="DATA.jsonl",
        help="as openclaw-rl import reads them; or the directory of another run, whose accepted answers and "
        "corrections are imitated",
    )
    parser.add_argument(
        "--epochs", type=positive, default=1, metavar="N", help="how often to go through the files (default: 1)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check options, files and folders, show the configuration, and exit"
    )


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.startup_signals import Start
    from openclaw_rl.app.train import check_training, train

    loaded = load_options(options)
    if missing := next((file for file in options.files if not file.exists()), None):
        raise UserError(f"There is no file or run directory {missing}.")
    if options.dry_run:
        check_training(loaded.config)
        show(loaded)
        return 0
    try:
        result = train(loaded.config, options.files, options.epochs, Start())
    except KeyboardInterrupt:
        print("openclaw-rl: Stopped. The same command goes on from here.", file=sys.stderr)  # noqa: T201
        raise
    for refused in result.imported.errors:
        sys.stderr.write(printable(refused) + "\n")
    report(result)
    return UNFINISHED if result.imported.errors or result.why_unfinished else 0


def report(result: "TrainingResult") -> None:
    """Print what became of the turns, and where the checkpoint is."""
    counts = result.counts
    imported = result.imported
    known = f", {imported.known} were there already" if imported.known else ""
    saved = result.checkpoint
    rows = [
        ("imported", f"{imported.turns}{known}, {len(imported.errors)} lines refused"),
        ("turns", str(counts.total)),
        ("judged", str(result.judged)),
        ("trained on", str(counts.states[State.APPLIED])),
        ("dropped", str(counts.states[State.DROPPED])),
        *((f"  {count}", reason) for reason, count in counts.dropped.items()),
        ("steps", f"{result.steps} now, {counts.step} in all"),
        ("checkpoint", str(saved.folder) if saved else "none: no step was made"),
    ]
    table = Table.grid(padding=(0, 2))
    for label, value in rows:
        table.add_row(label, Text(value, overflow="fold"))
    out = console()
    out.print(table)
    if result.why_unfinished:
        out.print(f"Not all was trained on: {result.why_unfinished}.")

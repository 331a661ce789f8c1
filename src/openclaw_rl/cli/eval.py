"""`openclaw-rl eval`: measure what a model can do."""

import argparse
from pathlib import Path
from typing import Any

from openclaw_rl.cli.checkpoints import newest_of_line
from openclaw_rl.cli.parser import add_command, load_options, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.evals.arguments import BASE, MODEL_OPTIONS, TASKS

DOC = "measure what a model can do: conversation, coding, tool use"


def add(commands: Any) -> None:
    parser = add_command(commands, "eval", DOC, run, (*MODEL_OPTIONS, "run_dir"))
    parser.add_argument(
        "--model-path", default=BASE, metavar="CKPT", help="a checkpoint or a model folder, or base (the default)"
    )
    parser.add_argument("--line", metavar="KEY-NAME", help="measure the newest checkpoint of this person's line")
    parser.add_argument(
        "--eval-tasks",
        default=",".join(TASKS[:3]),
        metavar="TASKS",
        help=f"some of {', '.join(TASKS)} (default: the first three; bfcl needs the package bfcl-eval)",
    )
    parser.add_argument("--quick", action="store_true", help="ask at most 16 cases of each task")
    parser.add_argument("--compare", metavar="CKPT", help="another model to compare with, for example base")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="also write every case and answer to a file")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.machine import machine_of
    from openclaw_rl.evals.evaluate import evaluate

    if options.line is not None:
        if options.model_path != BASE:
            raise UserError("--line names the checkpoint to measure: leave out --model-path, or use --compare.")
        options.model_path = str(newest_of_line(run_config(options), options.line))
    return evaluate(machine_of(load_options(options).config), options)

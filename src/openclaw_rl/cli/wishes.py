"""`openclaw-rl wishes`: how well and how soon a model keeps what people wish."""

import argparse
import itertools
from pathlib import Path
from typing import Any

from openclaw_rl.cli.parser import add_command, check_server_options, load_options, positive
from openclaw_rl.evals.arguments import MODEL_OPTIONS

DOC = "measure how well and how soon a model keeps what people wish, by notes, corrections and practice"


def add(commands: Any) -> None:
    parser = add_command(commands, "wishes", DOC, run, MODEL_OPTIONS)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="built-in wishes or paths of TOML files (default: those of --set); options for the server may follow --",
    )
    parser.add_argument(
        "--set", choices=("tuning", "report", "all"), default="tuning", help="which built-in wishes (default: tuning)"
    )
    parser.add_argument(
        "--questions", type=positive, default=40, metavar="N", help="unseen questions in each examination (default: 40)"
    )
    parser.add_argument(
        "--practise",
        action="store_true",
        help="after two corrections let the policy practise, and examine it without notes and examples; each wish then "
        "has a server of its own. After -- --sampler upstream …, a local model takes over what was taught",
    )
    parser.add_argument(
        "--at-once", type=positive, default=4, metavar="N", help="wishes measured at the same time (default: 4)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="the folder of the results; one that has some is continued (default: a new one)",
    )


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.machine import machine_of
    from openclaw_rl.evals.wishes.suite import measure_wishes

    # What follows -- are positional arguments too. No wish begins with a dash.
    given = options.names
    options.names = list(itertools.takewhile(lambda word: not word.startswith("-"), given))
    server = given[len(options.names) :]
    check_server_options(options.program, server)
    return measure_wishes(machine_of(load_options(options).config), options, server)

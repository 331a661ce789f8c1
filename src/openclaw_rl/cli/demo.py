"""`openclaw-rl demo`: simulated people teach the model what they like."""

import argparse
from pathlib import Path
from typing import Any

from openclaw_rl.cli.parser import add_command, check_server_options, load_options
from openclaw_rl.config.general import PERSONAL, PRESETS
from openclaw_rl.evals.arguments import METHODS, MODEL_OPTIONS, USER_KEY
from openclaw_rl.evals.personas.persona import BUILT_IN

DOC = "watch simulated people teach the model what they like, and get a picture of it"


def add(commands: Any) -> None:
    parser = add_command(commands, "demo", DOC, run, MODEL_OPTIONS)
    # `dest` is not `method`, because that is an option of the server, which does not take `all`.
    usual = PRESETS[PERSONAL]["method"]
    parser.add_argument(
        "--method",
        dest="methods",
        metavar="METHOD",
        default=usual,
        help=f"how to learn: {', '.join(METHODS)}, all, or path/file.py:Name for your own "
        f"(default: {usual}, as make run has it)",
    )
    parser.add_argument(
        "--persona",
        default="brief",
        help=f"who talks to it: {', '.join(BUILT_IN)}, all, or the path of a TOML file (default: brief)",
    )
    parser.add_argument(
        "--wish",
        metavar="NAME",
        default="",
        help="instead, somebody who corrects two answers, after which the model practises what they wished: pirate, "
        "chef or another of 'openclaw-rl wishes', or the path of a TOML file",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="longest time to talk; start and the first and last examination take extra time (default: 9)",
    )
    parser.add_argument(
        "--sessions", type=int, default=300, metavar="N", help="maximum number of sessions (default: 300)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="number of seeds to repeat each trial with (default: 1)"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        metavar="N",
        help="trials that run at the same time, each with its own server (default: 1)",
    )
    parser.add_argument("--out", type=Path, help="a new folder for the results (default: runs/demo, or runs/demo-2 …)")
    parser.add_argument(
        "--user-base-url", default="", help=f"let the model at this address play the person (key: {USER_KEY})"
    )
    parser.add_argument("--user-model", default="", help="the name of that model")
    parser.add_argument("server", nargs="*", metavar="-- OPTIONS", help="further options for the server")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.machine import machine_of
    from openclaw_rl.evals.demo import demo

    check_server_options(options.program, options.server)
    return demo(machine_of(load_options(options).config), options)

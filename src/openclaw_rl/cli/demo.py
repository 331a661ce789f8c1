"""`openclaw-rl demo`: simulated people teach the model what they like."""

import argparse
from pathlib import Path
from typing import Any

from openclaw_rl.cli.parser import add_command, load_options
from openclaw_rl.evals.flags import METHODS, MODEL_OPTIONS, USER_KEY
from openclaw_rl.evals.personas.persona import BUILT_IN

DOC = "watch simulated people teach the model what they like, and get a picture of it"


def add(commands: Any) -> None:
    parser = add_command(commands, "demo", DOC, run, MODEL_OPTIONS)
    # Not `method`, which is an option of the server and does not take all of them.
    parser.add_argument(
        "--method", dest="methods", choices=(*METHODS, "all"), default="combine", help="how to learn (default: combine)"
    )
    parser.add_argument(
        "--persona",
        default="brief",
        help=f"who talks to it: {', '.join(BUILT_IN)}, all of them (all), or a TOML file of yours (default: brief)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="longest time to talk; the start and the first and last examination come on top (default: 9)",
    )
    parser.add_argument("--sessions", type=int, default=300, help="most sessions to hold (default: 300)")
    parser.add_argument("--seeds", type=int, default=1, help="repeat each trial with so many seeds (default: 1)")
    parser.add_argument(
        "--at-once", type=int, default=1, help="trials side by side, each with its own server (default: 1)"
    )
    parser.add_argument("--out", type=Path, help="a new folder to write to (default: runs/demo, or runs/demo-2 …)")
    parser.add_argument(
        "--user-base-url", default="", help=f"let a model play the person, at this address (key: {USER_KEY})"
    )
    parser.add_argument("--user-model", default="", help="the name of that model")
    parser.add_argument("server", nargs="*", metavar="-- OPTIONS", help="further options for the server")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.machine import machine_of
    from openclaw_rl.evals.demo import demo

    return demo(machine_of(load_options(options).config), options)

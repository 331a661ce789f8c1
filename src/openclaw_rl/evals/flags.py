"""The options of `demo` and `eval`, apart from them: asking for help loads nothing heavy."""

from pathlib import Path
from typing import Any

from openclaw_rl.evals.personas.persona import BUILT_IN

#: The order in which methods are named everywhere.
METHODS = ("topk-select", "combine", "opd", "rl")
#: Where the key of the model that plays the person is looked for.
USER_KEY = "OPENCLAW_DEMO_USER_API_KEY"


def add_demo_options(parser: Any) -> None:
    """The demo's own options; everything after `--` is the server's."""
    methods = (*METHODS, "all")
    # Not `method`, which is an option of the server, and never all of them.
    parser.add_argument(
        "--method", dest="methods", choices=methods, default="combine", help="how to learn (default: combine)"
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


#: What `eval` measures; the last needs a package of its own.
TASKS = ("conversation", "coding", "tool-use", "bfcl")
#: The name of the model that nothing was learned by yet.
BASE = "base"


def add_eval_options(parser: Any) -> None:
    parser.add_argument(
        "--model-path", default=BASE, metavar="CKPT", help="a checkpoint or a model folder, or base (the default)"
    )
    parser.add_argument(
        "--eval-tasks",
        default=",".join(TASKS[:3]),
        metavar="TASKS",
        help=f"some of {', '.join(TASKS)} (default: the first three; bfcl needs the package bfcl-eval)",
    )
    parser.add_argument("--compare", metavar="CKPT", help="another one to measure beside it, for example base")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="also write every case and answer to a file")

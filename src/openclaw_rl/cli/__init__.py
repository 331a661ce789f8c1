"""The command line: `openclaw-rl COMMAND …`. A module has one command, or a few that belong together.

`add` adds their arguments. The function that runs a command imports what it needs, so that help and small commands stay
fast.
"""

import errno
import sys
from collections.abc import Sequence

from openclaw_rl import __version__
from openclaw_rl.cli import (
    benchmark,
    chat,
    checkpoints,
    completion,
    connect,
    demo,
    doctor,
    eval,
    forget,
    launch,
    merge,
    notes,
    practise,
    rejudge,
    report,
    rollout,
    serve,
    sessions,
    status,
    train,
    trajectories,
    wishes,
)
from openclaw_rl.cli.parser import Parser
from openclaw_rl.config.options import quoted
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import printable

#: In the order that --help lists them.
COMMANDS = (
    *(serve, train, demo, eval, wishes, benchmark, rollout, chat, connect, doctor, status, sessions, notes, practise),
    *(trajectories, rejudge, checkpoints, merge, report, forget, launch, completion),
)
#: Exit status for an error that the user can fix, as in argparse.
USAGE_ERROR = 2
#: Exit status after Ctrl-C, as in shells.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = build_parser()
    try:
        options = parser.parse_args(arguments)
        if options.run is None:
            parser.print_help()
            return 0
        return int(options.run(options))
    except UserError as error:
        print(f"openclaw-rl: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except OSError as error:
        # Any option that names a file or a model may be given such a name.
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"openclaw-rl: This name is too long: {quoted(error.filename)}.", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> Parser:
    parser = Parser(
        prog="openclaw-rl",
        description="An OpenAI-compatible server for a model you own, which learns from being used.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"openclaw-rl {__version__}")
    # `launch` runs other commands with the same parser.
    parser.set_defaults(run=None, program=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser

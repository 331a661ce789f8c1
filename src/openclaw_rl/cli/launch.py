"""`openclaw-rl launch`: what the scripts in `launch/` run."""

import argparse
import os
import shlex
import sys
from typing import Any, NoReturn

from openclaw_rl.cli.parser import Parser, secret_flag
from openclaw_rl.config.options import ConfigError
from openclaw_rl.http_client import text_without_accounts
from openclaw_rl.terminal import printable

DOC = "run a setting of the published scripts, with their variables"
#: Exit status of `train` if lines of a file were refused; the server can start all the same.
SOME_REFUSED = 1


def add(commands: Any) -> None:
    parser: Parser = commands.add_parser("launch", help=DOC, description=f"{DOC[0].upper()}{DOC[1:]}.")
    parser.add_argument("script", metavar="SCRIPT", help="such as run_terminal_rl; an unknown name gets a list of all")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="…", help="options, such as --dry-run")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.cli.launchers.build import build, unread
    from openclaw_rl.cli.launchers.scripts import RAY_SCRIPT, SCRIPTS, find_ray, inner_script, ray_job

    on_cluster = options.script == RAY_SCRIPT
    name = options.script
    flags = options.flags
    if on_cluster:
        name = inner_script(flags)
        flags = flags[1:]
    if name not in SCRIPTS:
        raise ConfigError(f"There is no script {name}: use one of {', '.join((*SCRIPTS, RAY_SCRIPT))}.")
    launch = build(SCRIPTS[name], flags, os.environ)
    for variable in unread(os.environ, SCRIPTS[name].runs):
        sys.stderr.write(f"{variable} has no effect in {name}.\n")
    for variable in os.environ.keys() - launch.environment.keys():
        del os.environ[variable]
    os.environ.update(launch.environment)
    if on_cluster:
        if len(launch.commands) > 1:
            raise ConfigError(
                f"{RAY_SCRIPT}.sh submits one command: with DATA_PATH, also set TRAIN_ONLY=1, or unset it."
            )
        submitted = ray_job(launch.commands[-1], launch.environment)
        show(submitted)
        if not launch.dry_run:
            replace(find_ray(), submitted)
        return check(options.program, launch.commands[-1])
    for command in launch.commands:
        show(["openclaw-rl", *command])
        if not launch.dry_run and command is launch.commands[-1]:
            replace(sys.executable, [sys.executable, "-m", "openclaw_rl", *command])
        status = check(options.program, command) if launch.dry_run else run_command(options.program, command)
        if status not in (0, SOME_REFUSED):
            return status
    return 0


def run_command(program: Parser, command: list[str]) -> int:
    """Run another command of this program; its exit status."""
    options = program.parse_args(command)
    return int(options.run(options))


def check(program: Parser, command: list[str]) -> int:
    """Check a command without running it; its exit status."""
    if command[0] != "eval":
        return run_command(program, [command[0], "--dry-run", *command[1:]])
    program.parse_args(command)
    return 0


def replace(program: str, words: list[str]) -> NoReturn:
    """Let a command take the place of this process."""
    sys.stderr.flush()
    os.execv(program, words)


def show(command: list[str]) -> None:
    sys.stderr.write(printable(shlex.join(without_secrets(command))) + "\n")


def without_secrets(command: list[str]) -> list[str]:
    """The command as it may be printed."""
    shown = []
    for before, word in zip(["", *command], command, strict=False):
        if "=" in word and secret_flag(word):
            word = f"{word.partition('=')[0]}=***"
        shown.append("***" if secret_flag(before) and "=" not in before else text_without_accounts(word))
    return shown

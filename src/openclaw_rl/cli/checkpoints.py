"""`openclaw-rl checkpoints`, `rollback`, `relearn`: list the checkpoints of a run, serve an earlier one, learn from
what the guard set aside."""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.app.config import Config
from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, add_command, add_line_flag, run_config
from openclaw_rl.client import Client
from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import line_folder
from openclaw_rl.ledger.run_dir import server_url, was_served
from openclaw_rl.ledger.schema import check_ledger, open_ledger, transaction
from openclaw_rl.terminal import console, plural, print_titled, say

NO_CHECKPOINT = "Give a checkpoint (openclaw-rl checkpoints lists them), or --line KEY-NAME."
ROLLBACK_DOC = "serve an earlier policy, and continue learning from it"
RELEARN_DOC = "learn from the turns that the guard set aside, all the same"


def add(commands: Any) -> None:
    add_checkpoints(commands)
    add_rollback(commands)
    add_line_flag(add_command(commands, "relearn", RELEARN_DOC, run_relearn, (*RUN_OPTIONS, *KEY_OPTIONS)))


def add_checkpoints(commands: Any) -> None:
    doc = "list the checkpoints of a run"
    add_line_flag(add_command(commands, "checkpoints", doc, run_checkpoints, RUN_OPTIONS))


def run_checkpoints(options: argparse.Namespace) -> int:
    from openclaw_rl.learn.guard import FILE, GuardState

    config = run_config(options)
    saved = config.checkpoints_of(options.line)
    checkpoints = saved.all()
    if not checkpoints:
        if not was_served(config.run.folder):
            check_ledger(config.ledger_dir)  # sessions may have been imported
        when = "one is made every --save-interval steps and when the server stops"
        say(f"No checkpoint in {saved.folder} yet: {when}.")
        return 0
    table = Table("step", "policy version", "made", "steps in it", "folder")
    for item in checkpoints:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.created))
        table.add_row(str(item.step), str(item.version), made, str(len(item.batches)), Text(item.folder.name))
    print_titled(console(), f"Checkpoints in {saved.folder}", table)
    if guard := GuardState.read(line_folder(config.run.folder, options.line) / FILE).in_words():
        console().print(Text.assemble(("Guard: ", "bold"), guard), soft_wrap=True)
    return 0


def newest_of_line(config: Config, line: str | None) -> Path:
    """The newest checkpoint of a line. Raises UserError."""
    if line is None:
        raise UserError(NO_CHECKPOINT)
    newest = config.checkpoints_of(line).latest()
    if newest is None or newest.is_base_model:
        raise UserError(f"The line {line} has no checkpoint with weights of its own yet.")
    return newest.folder


def add_rollback(commands: Any) -> None:
    parser = add_command(
        commands, "rollback", ROLLBACK_DOC, run_rollback, (*RUN_OPTIONS, "keep_checkpoints", *KEY_OPTIONS)
    )
    parser.add_argument(
        "version",
        nargs="?",
        type=int,
        metavar="VERSION",
        help="a policy version that has a checkpoint, or 0 for the base model (default: the previous checkpoint)",
    )
    add_line_flag(parser)


def run_rollback(options: argparse.Namespace) -> int:
    from openclaw_rl.learn.rollback import roll_back_offline

    config = run_config(options)
    checkpoints = config.checkpoints_of(options.line)
    if server := server_url(config.run.folder):
        with Client(server, config.server.operator_key) as client:
            version = client.roll_back(options.version, line=options.line)
    else:
        with open_ledger(config.ledger_dir) as db:
            version = roll_back_offline(db, checkpoints, options.version, options.line)
    steps = [checkpoint.step for checkpoint in checkpoints.all() if checkpoint.version == version]
    origin = "" if not steps else f" (the weights of step {steps[0]})" if steps[0] else " (the base model)"
    when = "The server now serves" if server else "The next start serves"
    say(f"{when} policy {version}{origin}. Learning continues from it.")
    return 0


def run_relearn(options: argparse.Namespace) -> int:
    from openclaw_rl.learn.guard import FILE, GuardState
    from openclaw_rl.ledger.training import take_up_again

    config = run_config(options)
    if server := server_url(config.run.folder):
        with Client(server, config.server.operator_key) as client:
            turns = client.relearn(options.line)
    else:
        with open_ledger(config.ledger_dir) as db, transaction(db):
            turns = take_up_again(db, options.line)
        file = line_folder(config.run.folder, options.line) / FILE
        state = GuardState.read(file)
        if state.cautious:
            state.cautious = ""
            state.write(file)
    if turns:
        say(f"{plural(turns, 'turn waits', 'turns wait')} to be trained on again. The guard still watches.")
    else:
        say("The guard has set no turns aside.")
    return 0

"""`openclaw-rl rollback`: serve an earlier policy, with the server running or without it."""

import argparse
from typing import Any

from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, add_command, operator_key, run_config
from openclaw_rl.terminal import console

DOC = "serve an earlier policy, and continue learning from it"


def add(commands: Any) -> None:
    parser = add_command(commands, "rollback", DOC, run, (*RUN_OPTIONS, "keep_checkpoints", *KEY_OPTIONS))
    parser.add_argument(
        "version",
        nargs="?",
        type=int,
        metavar="VERSION",
        help="a policy version that has a checkpoint, or 0 for the base model (default: the previous checkpoint)",
    )


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.client import Client
    from openclaw_rl.learn.rollback import roll_back_offline
    from openclaw_rl.ledger.lock import server_url
    from openclaw_rl.ledger.schema import open_ledger

    config = run_config(options)
    checkpoints = config.checkpoints
    if server := server_url(config.run.folder):
        with Client(server, operator_key(config)) as client:
            version = client.roll_back(options.version)
    else:
        with open_ledger(config.ledger_dir) as db:
            version = roll_back_offline(db, checkpoints, options.version)
    steps = [checkpoint.step for checkpoint in checkpoints.all() if checkpoint.version == version]
    origin = "" if not steps else f" (the weights of step {steps[0]})" if steps[0] else " (the base model)"
    when = "The server now serves" if server else "The next start serves"
    console().print(f"{when} policy {version}{origin}. Learning continues from it.")
    return 0

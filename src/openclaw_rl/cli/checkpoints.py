"""`openclaw-rl checkpoints`: list the checkpoints of a run."""

import argparse
import time
from typing import Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.terminal import console, print_titled


def add(commands: Any) -> None:
    add_command(commands, "checkpoints", "list the checkpoints of a run", run, RUN_OPTIONS)


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.ledger.lock import was_served
    from openclaw_rl.ledger.schema import check_ledger

    config = run_config(options)
    saved = config.checkpoints
    checkpoints = saved.all()
    if not checkpoints:
        if not was_served(config.run.folder):
            check_ledger(config.ledger_dir)  # sessions may have been imported
        when = "one is made every --save-interval steps and when the server stops"
        console().print(Text(f"No checkpoint in {saved.folder} yet: {when}."), soft_wrap=True)
        return 0
    table = Table("step", "policy version", "made", "steps in it", "folder")
    for item in checkpoints:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.created))
        table.add_row(str(item.step), str(item.version), made, str(len(item.batches)), Text(item.folder.name))
    print_titled(console(), f"Checkpoints in {saved.folder}", table)
    return 0

"""`openclaw-rl practise`: let the policy learn notes for good, without another word."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from sqlite3 import Connection
from typing import Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console, progress
from openclaw_rl.types import ENDED_PRACTICE, NoteState, Practice, PracticeState

DOC = "practise notes until the policy keeps to them without being told, and wait until it serves"
#: How often to look how far it is.
LOOK_SECONDS = 0.5


def add(commands: Any) -> None:
    parser = add_command(commands, "practise", DOC, run, RUN_OPTIONS)
    parser.add_argument(
        "note",
        nargs="?",
        type=int,
        metavar="NOTE",
        help="the number of a note ('openclaw-rl notes' lists them; default: all that are given to the model)",
    )
    parser.add_argument("--no-wait", action="store_true", help="only ask for it, and return at once")
    parser.add_argument("--list", action="store_true", help="list what was practised so far, and how it went")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.ledger import practices
    from openclaw_rl.ledger.errors import CannotPractise, UnknownNote
    from openclaw_rl.ledger.run_dir import server_url
    from openclaw_rl.ledger.schema import open_ledger, transaction

    config = run_config(options)
    with open_ledger(config.ledger_dir) as db:
        if options.list:
            console().print(practices_table(practices.load_all(db)))
            return 0
        numbers = [options.note] if options.note is not None else notes_in_use(db)
        try:
            with transaction(db):
                wanted = [practices.request(db, number) for number in numbers]
        except (CannotPractise, UnknownNote) as error:
            raise UserError(f"{error} 'openclaw-rl notes' lists them.") from None
        if options.no_wait or not server_url(config.run.folder):
            when = "" if server_url(config.run.folder) else ", once a server runs (openclaw-rl serve)"
            console().print(f"To be practised{when}: {', '.join(f'note {one.note}' for one in wanted)}.")
            return 0
        ended = [watch(partial(practices.load, db, one.number)) for one in wanted]
    console().print(practices_table(ended))
    return 0 if all(one.state is not PracticeState.STOPPED for one in ended) else 1


def notes_in_use(db: Connection) -> list[int]:
    from openclaw_rl.ledger.notes import of_owner

    numbers = [note.number for note in of_owner(db) if note.state is NoteState.ACTIVE]
    if not numbers:
        raise UserError("There is no note to practise: one is written when a user says how to answer.")
    return numbers


def watch(load: Callable[[], Practice]) -> Practice:
    """Show how far a practice is until it ends."""
    with progress() as shown:
        current = load()
        task = shown.add_task(f"Note {current.note} waits until nobody needs the machine", total=None)
        while current.state not in ENDED_PRACTICE:
            time.sleep(LOOK_SECONDS)
            current = load()
            if current.steps:
                what = f"Note {current.note}: step {current.made} of {current.steps}"
                shown.update(task, description=what, total=current.steps, completed=current.made)
    return current


def practices_table(practices: list[Practice]) -> Table:
    table = Table("practice", "note", "steps", "minutes", "state")
    for one in practices:
        minutes = f"{(one.ended - one.created) / 60:.1f}" if one.ended else ""
        state = Text(f"{one.state}: {one.reason}" if one.reason else str(one.state))
        table.add_row(str(one.number), str(one.note), f"{one.made} of {one.steps}", minutes, state)
    return table

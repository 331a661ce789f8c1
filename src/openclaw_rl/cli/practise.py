"""`openclaw-rl practise`: let the policy learn notes for good, without another word."""

import argparse
import time
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.app.config import Config
from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, add_command, run_config
from openclaw_rl.client import ready_state
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.errors import CannotPractise, UnknownNote
from openclaw_rl.ledger.run_dir import server_url
from openclaw_rl.ledger.schema import open_ledger, transaction
from openclaw_rl.terminal import console, progress, say
from openclaw_rl.types import NoteState, Practice, PracticeState

DOC = "practise notes until the policy keeps to them without being told, and wait until it serves"
#: How often to look how far it is.
LOOK_SECONDS = 0.5


def add(commands: Any) -> None:
    parser = add_command(commands, "practise", DOC, run, (*RUN_OPTIONS, *KEY_OPTIONS))
    parser.add_argument(
        "note",
        nargs="?",
        type=int,
        metavar="NOTE",
        help="the number of a note ('openclaw-rl notes' lists them; default: all that are given to the model)",
    )
    parser.add_argument("--no-wait", action="store_true", help="only ask for it, and return at once")
    parser.add_argument("--stop", action="store_true", help="stop what waits or is being practised")
    parser.add_argument("--list", action="store_true", help="list what was practised so far, and how it went")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.ledger.practices import load_all

    config = run_config(options)
    with open_ledger(config.ledger_dir) as db:
        if options.list:
            listed = load_all(db)
            console().print(practices_table(listed) if listed else "Nothing was practised yet.")
            return 0
        try:
            if options.stop:
                return stop(db, options.note)
            return practise(config, db, options.note, wait=not options.no_wait)
        except (CannotPractise, UnknownNote) as error:
            raise UserError(f"{error} 'openclaw-rl notes' lists them.") from None


def stop(db: Connection, note: int | None) -> int:
    from openclaw_rl.ledger import practices

    under_way = [one.note for one in practices.load_all(db) if one.is_under_way]
    with transaction(db):
        stopped = [practices.stop(db, number) for number in ([note] if note is not None else under_way)]
    say(f"Stopped: {named(stopped)}." if stopped else "Nothing is being practised.")
    return 0


def practise(config: Config, db: Connection, note: int | None, *, wait: bool) -> int:
    """Ask for the practice of a note, or of all, and wait for its end. Raises UserError."""
    from openclaw_rl.ledger import practices

    server = server_url(config.run.folder)
    # A server that does not know the key, or does not answer, may practise all the same.
    able = ready_state(server, config.server.operator_key).get("practice", "on") if server else "on"
    if able != "on":
        raise UserError(able)
    with transaction(db):
        wanted = [practices.request(db, number) for number in ([note] if note is not None else notes_in_use(db))]
    if not server:
        say(f"No server runs. Once one does (openclaw-rl serve), it practises {named(wanted)}.")
        return 0
    if not wait:
        say(f"To be practised: {named(wanted)}. 'openclaw-rl practise --list' shows how far it is.")
        return 0
    try:
        ended = [practice for one in wanted if (practice := watch(config.run.folder, db, one))]
    except KeyboardInterrupt:
        say("The server goes on practising. 'openclaw-rl practise --list' shows how far it is, --stop ends it.")
        raise
    if ended:
        console().print(practices_table(ended))
    learned = [one for one in ended if one.state in (PracticeState.LEARNED, PracticeState.DONE)]
    return 0 if len(learned) == len(wanted) else 1


def notes_in_use(db: Connection) -> list[int]:
    from openclaw_rl.ledger.notes import of_owner

    numbers = [note.number for note in of_owner(db) if note.state is NoteState.ACTIVE]
    if not numbers:
        raise UserError("There is no note to practise: one is written when a user says how to answer.")
    return numbers


def watch(run_dir: Path, db: Connection, practice: Practice) -> Practice | None:
    """Show how far a practice is until it ends; None, and a sentence, if its note is deleted. Raises UserError."""
    from openclaw_rl.ledger.practices import load

    try:
        with progress() as shown:
            task = shown.add_task("", total=None)
            while (practice := load(db, practice.number)).is_under_way:
                if not server_url(run_dir):
                    raise UserError(f"The server has stopped. It goes on with note {practice.note} when it runs again.")
                how_far = f"step {practice.made} of {practice.steps}" if practice.steps else "waits its turn"
                if practice.steps and shown.tasks[task].total is None:
                    # What was made before is no measure of the pace.
                    shown.reset(task, total=practice.steps, completed=practice.made)
                shown.update(task, description=f"Note {practice.note}: {how_far}", completed=practice.made)
                time.sleep(LOOK_SECONDS)
    except CannotPractise:
        say(f"Note {practice.note} was deleted, so its practice has ended.")
        return None
    return practice


def practices_table(practices: list[Practice]) -> Table:
    table = Table("note", "minutes", "practice")
    for one in practices:
        minutes = f"{(one.ended - one.created) / 60:.1f}" if one.ended else ""
        table.add_row(str(one.note), minutes, Text(one.words))
    return table


def named(practices: list[Practice]) -> str:
    return ", ".join(f"note {one.note}" for one in practices)

"""`openclaw-rl notes`: what users asked for, and how it is changed by hand."""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from sqlite3 import Connection
from typing import Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.config.options import add_flags
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.errors import TooManyNotes, UnknownNote
from openclaw_rl.ledger.schema import open_ledger, snapshot, transaction
from openclaw_rl.terminal import console, say
from openclaw_rl.types import Note, NoteOutcomes, NoteState, Practice

DOC = "list the notes of what users asked for and the examples that they gave, or add, edit, remove and pin some"
#: Characters of an example's question and answer in the table.
MAX_SHOWN = 160
#: The narrowest column for the text of a note, also beside long names of owners.
MIN_TEXT = 24


def add(commands: Any) -> None:
    parser = add_command(commands, "notes", DOC, run, RUN_OPTIONS)
    parser.add_argument("--user", metavar="KEY-NAME", default=None, help="the API key whose notes to show or add to")
    parser.add_argument("--all", action="store_true", help="list removed notes too")
    actions = parser.add_subparsers(metavar="ACTION", dest="action")
    parser.set_defaults(change=None)
    for name, doc, change, arguments in ACTIONS:
        action = actions.add_parser(name, help=doc, description=f"{doc[0].upper()}{doc[1:]}.")
        add_flags(action, FIELDS, only=RUN_OPTIONS)
        if change in (add_note, add_example):
            action.add_argument("--user", metavar="KEY-NAME", default=argparse.SUPPRESS, help="whose note it is")
        for argument, kind in arguments.items():
            action.add_argument(argument, type=kind)
        action.set_defaults(change=change)


def run(options: argparse.Namespace) -> int:
    config = run_config(options)
    with open_ledger(config.ledger_dir) as db:
        if options.change is None:
            with snapshot(db):
                list_notes(db, options.user, all_states=options.all)
            return 0
        try:
            said = options.change(db, options)
        except (TooManyNotes, UnknownNote) as error:
            raise UserError(f"{error} 'openclaw-rl notes' lists them.") from None
    say(said)
    return 0


def list_notes(db: Connection, user: str | None, *, all_states: bool) -> None:
    from openclaw_rl.ledger.notes import of_owner
    from openclaw_rl.ledger.practices import latest

    out = console()
    notes = of_owner(db, user, all_states=all_states)
    examples = of_owner(db, user, all_states=all_states, examples=True)
    if not notes and not examples:
        whose = f" of {user}" if user else ""
        say(f"There is no note{whose} yet: one is written when a user says how to answer.")
        return
    if notes:
        out.print(notes_table(notes, "note", latest(db, user)))
    if examples:
        out.print(notes_table(examples, "example", {}))


def notes_table(notes: Sequence[Note], kind: str, practised: Mapping[int, Practice]) -> Table:
    """Notes or examples with their source, how often they held, their state, and their last practice."""
    table = Table()
    owners = len({note.owner for note in notes}) > 1
    for heading in (kind, *(["owner"] if owners else []), "text", "from", "held", "state"):
        table.add_column(heading, overflow="fold", min_width=MIN_TEXT if heading == "text" else None)
    for note in notes:
        source = str(note.origin) if note.turn is None else f"{note.origin}, turn {note.turn}"
        since = time.strftime("%Y-%m-%d", time.localtime(note.created))
        owner = [Text(note.owner)] if owners else []
        held = "\n".join((*share("with", note.given), *share("without", note.withheld)))
        text = f"{shortened(note.question)}\n→ {shortened(note.text)}" if note.question else note.text
        cell = Text(text)
        if practice := practised.get(note.number):
            cell.append(f"\n{practice.words}", "dim")
        table.add_row(str(note.number), *owner, cell, f"{source}\n{since}", held, Text(state_cell(note)))
    return table


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} …"


def share(given: str, outcomes: NoteOutcomes) -> list[str]:
    return [f"{given} {outcomes.held} of {outcomes.total}"] if outcomes.total else []


def state_cell(note: Note) -> str:
    state = "pinned" if note.pinned and not note.reason else str(note.state)
    if not note.reason:
        return state
    since = time.strftime("%d %B %Y", time.localtime(note.changed)).lstrip("0")
    return f"{state}: {note.reason}" + (f" on {since}" if note.state is NoteState.RETIRED else "")


def add_note(db: Connection, options: argparse.Namespace) -> str:
    from openclaw_rl.judge.rules.wishes import topic_of
    from openclaw_rl.ledger import notes

    text = read_text(options.text)
    topic = topic_of(text)
    with transaction(db):
        note = notes.add(db, options.user or only_owner(db), text, topic)
    return f"Note {note.number} of {note.owner}: {note.text} It is given from the next conversation on."


def edit_note(db: Connection, options: argparse.Namespace) -> str:
    from openclaw_rl.judge.rules.wishes import topic_of
    from openclaw_rl.ledger.notes import load

    text = read_text(options.text, is_example=bool(load(db, options.number).question))
    note = edit(db, options.number, text=text, topic=topic_of(text))
    return f"Note {note.number} is now: {note.text}"


def add_example(db: Connection, options: argparse.Namespace) -> str:
    from openclaw_rl.ledger import notes

    question = read_text(options.question, is_example=True)
    answer = read_text(options.answer, is_example=True)
    with transaction(db):
        note = notes.add_example(db, options.user or only_owner(db), question, answer)
    return f"Example {note.number} of {note.owner} is given from the next conversation on."


def remove_note(db: Connection, options: argparse.Namespace) -> str:
    from openclaw_rl.ledger import notes

    with transaction(db):
        note = notes.remove(db, options.number)
    return f"Removed note {note.number}: {note.text} Conversations under way keep it; 'forget' deletes its text."


def pin_note(db: Connection, options: argparse.Namespace) -> str:
    note = edit(db, options.number, pinned=True)
    return f"Note {note.number} is pinned: it is always given, and never retired or replaced by what the user says."


def unpin_note(db: Connection, options: argparse.Namespace) -> str:
    return f"Note {edit(db, options.number, pinned=False).number} is no longer pinned."


def edit(db: Connection, number: int, *, text: str | None = None, topic: str = "", pinned: bool | None = None) -> Note:
    from openclaw_rl.ledger import notes

    with transaction(db):
        return notes.edit(db, number, text=text, topic=topic, pinned=pinned)


def read_text(text: str, *, is_example: bool = False) -> str:
    from openclaw_rl.ledger.examples import MAX_EXAMPLE_CHARACTERS
    from openclaw_rl.ledger.notes import MAX_NOTE_CHARACTERS, one_line

    most = MAX_EXAMPLE_CHARACTERS if is_example else MAX_NOTE_CHARACTERS
    if not one_line(text) or len(text) > most:
        raise UserError(f"{'An example' if is_example else 'A note'} has 1 to {most} characters.")
    return text


def only_owner(db: Connection) -> str:
    """The one user of this run; the owner of a server without keys if there is none yet. Raises UserError."""
    from openclaw_rl.api.auth import ANYONE
    from openclaw_rl.ledger.pages import session_summaries
    from openclaw_rl.ledger.sessions import IMPORTED

    owners = {session.key.owner for session in session_summaries(db)} - {IMPORTED} or {ANYONE}
    if len(owners) > 1:
        raise UserError(f"Give --user: the users of this run are {', '.join(sorted(owners))}.")
    return owners.pop()


Change = Callable[[Connection, argparse.Namespace], str]
#: Name, description, function and arguments of each action.
ACTIONS: tuple[tuple[str, str, Change, dict[str, type]], ...] = (
    ("add", "write a note, which the model is given from the next conversation on", add_note, {"text": str}),
    (
        "example",
        "write an example: a question, and the answer as you want it",
        add_example,
        {"question": str, "answer": str},
    ),
    ("edit", "change the text of a note, or the answer of an example", edit_note, {"number": int, "text": str}),
    ("remove", "stop using a note", remove_note, {"number": int}),
    ("pin", "give a note always, whatever the policy has learned", pin_note, {"number": int}),
    ("unpin", "let a note be tested and retired again", unpin_note, {"number": int}),
)

"""The page of notes: what its viewer asked for, their examples, how often each held, and how they are changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openclaw_rl.api.errors import ApiError
from openclaw_rl.dashboard.live.access import Viewer
from openclaw_rl.dashboard.live.actions import Fields, ledger_of, number_in
from openclaw_rl.dashboard.live.dashboard import Dashboard, dashboard_of
from openclaw_rl.ledger import notes, practices
from openclaw_rl.ledger.examples import MAX_EXAMPLE_CHARACTERS
from openclaw_rl.ledger.notes import MAX_NOTE_CHARACTERS
from openclaw_rl.ledger.pages import find_turns
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.types import Feedback, Note, NoteOutcomes, NoteState, Practice

#: Notes and examples that the page lists; the newest.
MAX_LISTED = 300


@dataclass(frozen=True, slots=True)
class NoteView:
    """A note or an example on the page."""

    note: Note
    session: int | None
    """The session in which it was said, if it is still there."""
    held: str
    practice: Practice | None
    """Its last one."""

    @property
    def is_practised(self) -> bool:
        return self.practice is not None and self.practice.is_under_way

    @property
    def can_practise(self) -> bool:
        return self.note.state is NoteState.ACTIVE and not self.note.question

    @property
    def learned(self) -> bool:
        return self.note.state is NoteState.RETIRED


async def page(request: Request) -> Response:
    server = dashboard_of(request).server

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        return {
            "notes": views(db, notes.of_owner(db, viewer.owner), practices.latest(db, viewer.owner)),
            "examples": views(db, notes.of_owner(db, viewer.owner, examples=True), {}),
            "longest_note": MAX_NOTE_CHARACTERS,
            "longest_example": MAX_EXAMPLE_CHARACTERS,
            "uses_notes": server.service.uses_notes,
            "practises": server.service.uses_notes and not server.operations.why_no_practice(),
        }

    return await dashboard_of(request).page(request, "notes", "notes", read)


def views(db: Connection, listed: list[Note], practised: Mapping[int, Practice]) -> list[NoteView]:
    """The newest notes first."""
    return [
        NoteView(note, session_of(db, note.turn), held_words(note), practised.get(note.number))
        for note in listed[: -MAX_LISTED - 1 : -1]
    ]


def session_of(db: Connection, turn: int | None) -> int | None:
    row = db.execute("SELECT session FROM turns WHERE number = ?", (turn,)).fetchone()
    return row and int(row["session"])


def held_words(note: Note) -> str:
    """How often a note held, in words; empty if nobody can say yet."""
    said = (outcome_words(note.given, "with it"), outcome_words(note.withheld, "without it"))
    return ", ".join(filter(None, said))


def outcome_words(outcomes: NoteOutcomes, when: str) -> str:
    return f"kept to in {outcomes.held} of {outcomes.total} answers {when}" if outcomes.total else ""


async def change(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> tuple[str, str]:
    """Add, edit, pin, unpin or remove a note or an example of the viewer, or practise a note."""
    if not dashboard.server.service.uses_notes:
        raise ApiError(409, "This server uses no notes (--no-notes).")
    changes = {"add": add, "edit": edit, "pin": pin, "unpin": pin, "remove": remove, "practise": practise, "stop": stop}
    chosen = changes.get(fields.get("do", ""))
    if chosen is None:
        raise ApiError(400, "The form does not say what to do.")
    return await chosen(dashboard, viewer, fields), ""


async def add(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> str:
    ledger = ledger_of(dashboard)
    if "question" in fields or "answer" in fields:
        question = text_in(fields, "question", MAX_EXAMPLE_CHARACTERS)
        answer = text_in(fields, "answer", MAX_EXAMPLE_CHARACTERS)
        await ledger.write(notes.add_example, viewer.owner, question, answer)
        return "Kept. It is shown to the model from your next conversation on."
    text = text_in(fields, "text", MAX_NOTE_CHARACTERS)
    topic = await dashboard.server.operations.topic_of(text)
    await ledger.write(notes.add, viewer.owner, text, topic)
    return "Noted, from your next conversation on."


async def edit(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> str:
    ledger = ledger_of(dashboard)
    number = number_in(fields, "note")
    note = await dashboard.threads.read(notes.load, number, viewer.owner)
    text = text_in(fields, "text", MAX_EXAMPLE_CHARACTERS if note.question else MAX_NOTE_CHARACTERS)
    topic = "" if note.question else await dashboard.server.operations.topic_of(text)
    await ledger.write(notes.edit, number, viewer.owner, text=text, topic=topic)
    return "Changed, from your next conversation on."


async def pin(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> str:
    pinned = fields.get("do") == "pin"
    await ledger_of(dashboard).write(notes.edit, number_in(fields, "note"), viewer.owner, pinned=pinned)
    return "Pinned: it is always given." if pinned else "No longer pinned."


async def remove(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> str:
    await ledger_of(dashboard).write(notes.remove, number_in(fields, "note"), viewer.owner)
    return "Removed. Conversations under way keep it."


async def practise(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> str:
    if reason := dashboard.server.operations.why_no_practice():
        raise ApiError(409, reason)
    await ledger_of(dashboard).write(practices.request, number_in(fields, "note"), viewer.owner)
    return "It is practised as soon as nobody needs the machine."


async def stop(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> str:
    await ledger_of(dashboard).write(practices.stop, number_in(fields, "note"), viewer.owner)
    return "Stopped. What was learned so far stays."


async def correct(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> tuple[str, str]:
    """The answer that the viewer wanted, as POST /v1/feedback with a correction."""
    wanted = text_in(fields, "correction", MAX_EXAMPLE_CHARACTERS)
    cards = await dashboard.threads.read(find_turns, viewer.owner, [number_in(fields, "turn")])
    if not cards:
        raise ApiError(404, "You have no such turn.")
    feedback = Feedback(-1.0, correction=wanted)
    write = ledger_of(dashboard).write
    is_example = await write(add_feedback, viewer.owner, cards[0].completion, cards[0].choice, feedback)
    if is_example and dashboard.server.service.uses_notes:
        return "Kept as an example, from your next conversation on.", ""
    return "Recorded as your verdict. It is no example, as with tools or a very long question.", ""


def text_in(fields: Fields, name: str, longest: int) -> str:
    """A text of a form. Raises ApiError."""
    # Browsers send the line ends of a form as two signs.
    text = fields.get(name, "").replace("\r\n", "\n").strip()
    if not text or len(text) > longest:
        raise ApiError(400, f"Write 1 to {longest} characters.")
    return text

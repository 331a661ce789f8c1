"""Examples: questions of a user with answers as wanted, kept beside the user's notes.

An example is a row of `notes` that has a question, so that it is given, withheld, counted, retired, pinned and
forgotten as a note is. `example_notes` has the notes that it shows: those that its answer was given under, and those
that its owner wished in the same session.
"""

import re
import sqlite3
import time

from openclaw_rl.ledger.errors import DamagedTurn
from openclaw_rl.ledger.packing import damage, known, unpack_message, whole_text
from openclaw_rl.ledger.sessions import load_messages
from openclaw_rl.rendering.chat import content_text
from openclaw_rl.rendering.clients import is_passing, message_words
from openclaw_rl.types import NoteOrigin, NoteState

#: Examples of one owner that are kept.
MAX_EXAMPLES = 50
#: Characters of an example's question, and of its answer. Longer ones would fill a small model's context.
MAX_EXAMPLE_CHARACTERS = 4000
#: Begins the reason of a note that another one replaced.
REPLACED = "replaced by note "
#: The better ones replace the others, and are given first.
BEST_ORIGINS = (NoteOrigin.CORRECTED, NoteOrigin.WRITTEN, NoteOrigin.IMPROVED, NoteOrigin.ACCEPTED)
WRITTEN_BY_OWNER = BEST_ORIGINS[:2]
#: Corrected examples that show a note. With so many, answers that were only accepted are not kept for it.
ENOUGH_CORRECTED = 2
#: Complaints in a row that are followed back to the question that they are about.
MAX_COMPLAINTS = 8
_WORD = re.compile(r"\w{4,}|\d+")
#: A wish with one of these words may be the opposite of a wish without it.
_NEGATIONS = re.compile(
    r"\b(?:no|not|never|stop|without|don'?t|nicht|keine?|nie|ohne|pas|jamais|sans|nunca|sin|não|sem|mai|senza|geen|niet)\b"
    r"|[不没別无]",
    re.IGNORECASE,
)


def keep_correction(db: sqlite3.Connection, turn: int, answer: str) -> bool:
    """Keep the answer that somebody wanted in place of a turn's as an example. False if it cannot be one."""
    _keep(db, turn, answer, NoteOrigin.CORRECTED)
    query = "SELECT 1 FROM notes WHERE turn = ? AND question != '' AND text = ? AND state != ?"
    return db.execute(query, (turn, whole_text(answer.strip()), NoteState.REMOVED)).fetchone() is not None


def keep_accepted(db: sqlite3.Connection, turn: int) -> None:
    """Keep a turn's answer as an example, if it shows a note that has few corrected ones.

    It was accepted: at once, under notes, or after the user complained about an earlier answer to the same question.
    """
    row = db.execute("SELECT parent FROM turns WHERE number = ?", (turn,)).fetchone()
    shown = _shown_notes(db, turn, NoteOrigin.ACCEPTED)
    if not shown or all(_corrected(db, note) >= ENOUGH_CORRECTED for note in shown):
        return
    improved = row["parent"] is not None and _was_rejected(db, row["parent"])
    answer = _answer(db, turn)
    if answer and (improved or row["parent"] is None):
        _keep(db, turn, answer, NoteOrigin.IMPROVED if improved else NoteOrigin.ACCEPTED)


def withdraw_accepted(db: sqlite3.Connection, turn: int) -> None:
    """Delete a turn's answer as an example: it was accepted once, and is not any more."""
    db.execute(
        "DELETE FROM notes WHERE turn = ? AND question != '' AND NOT pinned AND origin IN (?, ?)",
        (turn, NoteOrigin.IMPROVED, NoteOrigin.ACCEPTED),
    )


def is_answer(db: sqlite3.Connection, turn: int, text: str) -> bool:
    """Whether a text is what a turn answered, apart from white space. Raises DamagedTurn."""
    row = db.execute("SELECT answer FROM turns WHERE number = ?", (turn,)).fetchone()
    with damage(turn):
        return content_text(unpack_message(row["answer"]).get("content")).split() == text.split()


def link_note(db: sqlite3.Connection, note: int, turn: int | None) -> None:
    """Connect a note that was wished after a turn with the examples that show it.

    These are the examples of that session, without answers that were accepted before the wish, and those of earlier
    notes of the same topic that were replaced and that it says again, in the same or in other words.
    """
    db.execute(
        "INSERT OR IGNORE INTO example_notes (example, note) SELECT e.number, ? FROM notes e "
        "JOIN turns t ON t.number = e.turn WHERE e.question != '' AND (e.origin = ? OR e.turn > ?) "
        "AND t.session = (SELECT session FROM turns WHERE number = ?)",
        (note, NoteOrigin.CORRECTED, turn, turn),
    )
    for older in db.execute(
        "SELECT o.number, o.text, n.text AS new FROM notes n JOIN notes o ON o.owner = n.owner AND o.topic = n.topic "
        "WHERE n.number = ? AND o.number != n.number AND o.question = '' AND o.reason LIKE ?",
        (note, f"{REPLACED}%"),
    ).fetchall():
        if says_the_same(older["new"], older["text"]):
            db.execute("UPDATE OR IGNORE example_notes SET note = ? WHERE note = ?", (note, older["number"]))
            db.execute("DELETE FROM example_notes WHERE note = ?", (older["number"],))


def says_the_same(text: str, older: str) -> bool:
    """Whether a note says in other words what an older one of its topic said, so that its examples still show it.

    They share a word and all numbers, and both or neither deny something. "Answer in English" and "in French" do not.
    """
    one, other = words(text), words(older)
    numbers = {word for word in one ^ other if word.isdigit()}
    denies = bool(_NEGATIONS.search(text)) == bool(_NEGATIONS.search(older))
    return bool(one & other - {"answer", "please", "user", "always"}) and not numbers and denies


def shown(db: sqlite3.Connection, owner: str) -> dict[int, set[int]]:
    """The notes that each of an owner's examples shows, those that are no longer in use among them."""
    notes: dict[int, set[int]] = {}
    query = "SELECT l.example, l.note FROM example_notes l JOIN notes e ON e.number = l.example WHERE e.owner = ?"
    for row in db.execute(query, (owner,)):
        notes.setdefault(row["example"], set()).add(row["note"])
    return notes


def retired(db: sqlite3.Connection, note: int) -> list[int]:
    """The retired examples that show a note."""
    query = "SELECT e.number FROM example_notes l JOIN notes e ON e.number = l.example WHERE l.note = ? AND e.state = ?"
    return [row["number"] for row in db.execute(query, (note, NoteState.RETIRED))]


def rank(origin: str) -> int:
    """The place of an example's origin, the best first; a damaged one is last."""
    return BEST_ORIGINS.index(known(NoteOrigin, origin, NoteOrigin.ACCEPTED))


def bound(db: sqlite3.Connection, owner: str, spared: int | None = None) -> bool:
    """Delete the examples of an owner that are more than MAX_EXAMPLES: the worst origin first, then the oldest.

    Pinned ones and the one that is `spared` stay. False if these are too many. Rows are not kept, as they are of notes:
    every accepted answer would leave one.
    """
    rows = db.execute(
        "SELECT number, origin, pinned FROM notes WHERE owner = ? AND question != '' AND state != ?",
        (owner, NoteState.REMOVED),
    ).fetchall()
    free = sorted(
        (row for row in rows if not row["pinned"] and row["number"] != spared),
        key=lambda row: (-rank(row["origin"]), row["number"]),
    )
    too_many = max(0, len(rows) - MAX_EXAMPLES)
    db.executemany("DELETE FROM notes WHERE number = ?", [(row["number"],) for row in free[:too_many]])
    return len(free) >= too_many


def question_of(db: sqlite3.Connection, turn: int, answer: str) -> str:
    """What a user asked that this answer to a turn answers; empty if there are tools, nobody's words, or damage.

    The request may only complain about the answer before. Then it is one of the earlier questions: the one that has
    most words in common with the answer.
    """
    asked: list[str] = []
    number: int | None = turn
    while number is not None and len(asked) < MAX_COMPLAINTS:
        row = db.execute("SELECT request, parent FROM turns WHERE number = ?", (number,)).fetchone()
        try:
            messages = load_messages(db, number, row["request"])
        except DamagedTurn:
            return ""
        if any(message["role"] in ("tools", "tool") for message in messages):
            return ""
        said = [message for message in messages if message["role"] == "user" and not is_passing(message)]
        asked.append(message_words(said[-1]).strip() if said else "")
        parent = row["parent"]
        number = parent if parent is not None and _was_rejected(db, parent) else None
    of_answer = words(answer)
    return max(reversed(asked), key=lambda text: len(words(text) & of_answer))


def words(text: str) -> set[str]:
    """The numbers and longer words of a text."""
    return {word.lower() for word in _WORD.findall(text)}


def _keep(db: sqlite3.Connection, turn: int, answer: str, origin: NoteOrigin) -> None:
    """Keep an example of a turn, in place of one of the same turn that is no better."""
    answer = whole_text(answer.strip())
    question = question_of(db, turn, answer)
    if not question or not answer or max(len(question), len(answer)) > MAX_EXAMPLE_CHARACTERS:
        return
    (owner,) = db.execute(
        "SELECT s.owner FROM turns t JOIN sessions s ON s.number = t.session WHERE t.number = ?", (turn,)
    ).fetchone()
    for row in db.execute("SELECT number, text, origin, state FROM notes WHERE turn = ? AND question != ''", (turn,)):
        if row["text"] == answer or rank(row["origin"]) < rank(origin):
            return
        db.execute("DELETE FROM notes WHERE number = ?", (row["number"],))
    now = time.time()
    number = db.execute(
        "INSERT INTO notes (owner, text, topic, turn, created, said, state, changed, origin, question) "
        "VALUES (?, ?, '', ?, ?, ?, ?, ?, ?, ?) RETURNING number",
        (owner, answer, turn, now, now, NoteState.ACTIVE, now, origin, whole_text(question)),
    ).fetchone()["number"]
    db.executemany(
        "INSERT INTO example_notes (example, note) VALUES (?, ?)",
        [(number, note) for note in _shown_notes(db, turn, origin)],
    )
    bound(db, owner)


def _shown_notes(db: sqlite3.Connection, turn: int, origin: NoteOrigin) -> list[int]:
    """The notes in use that an example of a turn shows: a correction may also know what was wished after the answer."""
    rows = db.execute(
        "SELECT n.number FROM turns t JOIN notes n ON n.question = '' AND n.state != ? AND ("
        " n.number IN (SELECT note FROM turn_notes WHERE turn = t.notes_from AND given)"
        " OR n.turn IN (SELECT number FROM turns s WHERE s.session = t.session AND (? OR s.number < t.number))"
        " OR (n.turn = t.number AND n.said <= t.created)) WHERE t.number = ?",
        (NoteState.REMOVED, origin is NoteOrigin.CORRECTED, turn),
    )
    return [row["number"] for row in rows]


def _corrected(db: sqlite3.Connection, note: int) -> int:
    """How many corrected examples show a note."""
    (count,) = db.execute(
        "SELECT count(*) FROM example_notes l JOIN notes e ON e.number = l.example "
        "WHERE l.note = ? AND e.origin = ? AND e.state != ?",
        (note, NoteOrigin.CORRECTED, NoteState.REMOVED),
    ).fetchone()
    return int(count)


def _was_rejected(db: sqlite3.Connection, turn: int) -> bool:
    row = db.execute("SELECT score FROM verdicts WHERE turn = ?", (turn,)).fetchone()
    return row is not None and row["score"] is not None and row["score"] < 0


def _answer(db: sqlite3.Connection, turn: int) -> str:
    """The text of a turn's answer; empty if it calls tools or was cut off."""
    row = db.execute("SELECT answer, finish_reason FROM turns WHERE number = ?", (turn,)).fetchone()
    with damage(turn):
        message = unpack_message(row["answer"])
    return "" if message.get("tool_calls") or row["finish_reason"] != "stop" else content_text(message.get("content"))

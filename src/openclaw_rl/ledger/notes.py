"""Notes: how they are written, replaced, withheld, counted and retired."""

import sqlite3
import time
from collections.abc import Mapping, Sequence

from openclaw_rl.ledger import examples, note_outcomes
from openclaw_rl.ledger.errors import TooManyNotes, UnknownNote
from openclaw_rl.ledger.packing import common_prefix, known, pack_ids, whole_text
from openclaw_rl.types import (
    ConversationNote,
    HeardWishes,
    Note,
    NoteOrigin,
    NoteOutcomes,
    NoteState,
    State,
    Turn,
    TurnKind,
    Wish,
    scope_stems,
)

#: Notes of one user that are kept.
MAX_NOTES = 500
MAX_NOTE_CHARACTERS = 300
#: Why notes are retired or removed.
DOES_WITHOUT = "the policy pleases as often without it"
BY_OWNER = "by its owner"
TAKEN_BACK = "its owner took it back"
TOO_MANY = f"a user has at most {MAX_NOTES} notes"
#: Begins the topic of a note that its owner wrote and that cannot be read as a wish; its text follows.
WRITTEN = "written/"
NO_OUTCOMES = NoteOutcomes()
Stamp = tuple[float | str | None, ...]
IN_USE = (NoteState.ACTIVE, NoteState.RETIRED)


def of_owner(
    db: sqlite3.Connection, owner: str | None = None, *, all_states: bool = False, examples: bool = False
) -> list[Note]:
    """The notes, or the examples, of one owner or of all, in the order in which they began.

    Removed ones are only listed with `all_states`.
    """
    states = tuple(NoteState) if all_states else IN_USE
    rows = db.execute(
        f"SELECT * FROM notes WHERE coalesce(?, owner) = owner AND (question != '') = ? "
        f"AND state IN ({', '.join('?' * len(states))}) ORDER BY number",
        (owner, examples, *states),
    )
    return [_note(db, row) for row in rows.fetchall()]


def load(db: sqlite3.Connection, number: int, owner: str | None = None) -> Note:
    """A note that was not removed; with `owner`, only if it is this owner's. Raises UnknownNote."""
    row = db.execute(
        "SELECT * FROM notes WHERE number = ? AND coalesce(?, owner) = owner AND state != ?",
        (number, owner, NoteState.REMOVED),
    ).fetchone()
    if row is None:
        raise UnknownNote(f"There is no note {number}{' of yours' if owner else ''}.")
    return _note(db, row)


def add(
    db: sqlite3.Connection, owner: str, text: str, topic: str = "", *, pinned: bool = False, scope: str = ""
) -> Note:
    """Write a note by its owner's hand; it replaces others of its topic, except pinned ones. Raises TooManyNotes.

    `scope` has words of the requests that it is for; empty: all.
    """
    text, scope = one_line(text), one_line(scope)
    wish = Wish(text, topic or WRITTEN + text, lasting=True, scope=scope)
    same = db.execute(
        "SELECT number FROM notes WHERE owner = ? AND text = ? AND question = '' AND state IN (?, ?)",
        (owner, text, *IN_USE),
    ).fetchone()
    if same is not None:
        _set_state(db, same["number"], NoteState.ACTIVE)
        _say(db, same["number"], time.time())
        return edit(db, same["number"], pinned=pinned or None)
    if len(_active(db, owner)) >= MAX_NOTES:
        raise TooManyNotes(f"There are {MAX_NOTES} notes already, which is the most: remove one first.")
    older = [note for note in map(_bare, _in_use(db, owner)) if not note.pinned and contradicts(wish, note)]
    number = _insert(db, owner, text, wish.topic, None, time.time(), pinned=pinned, scope=scope)
    _replace(db, older, number)
    return load(db, number)


def add_example(db: sqlite3.Connection, owner: str, question: str, answer: str, *, pinned: bool = False) -> Note:
    """Write an example by its owner's hand; of too many, another one is deleted. Raises TooManyNotes."""
    asked = example_text(question)
    number = _insert(db, owner, example_text(answer), "", None, time.time(), question=asked, pinned=pinned)
    if not examples.bound(db, owner, spared=number):
        raise TooManyNotes(f"There are {examples.MAX_EXAMPLES} pinned examples, which is the most: remove one first.")
    return load(db, number)


def edit(
    db: sqlite3.Connection,
    number: int,
    owner: str | None = None,
    *,
    text: str | None = None,
    topic: str = "",
    pinned: bool | None = None,
) -> Note:
    """Change a note; with `owner`, only if it is this owner's. Raises UnknownNote.

    A new text starts its counts anew; so does pinning a retired note, which is then given again. A note that no longer
    names its scope is for all requests. Examples of what it said before are not given with what it says now.
    """
    note = load(db, number, owner)
    new = None if text is None else example_text(text) if note.question else one_line(text)
    if new is not None and new != note.text:
        if not note.question and not examples.says_the_same(new, note.text):
            _leave_examples(db, note)
        topic = "" if note.question else topic or WRITTEN + new
        scope = note.scope if any(stem in new.casefold() for stem in scope_stems(note.scope)) else ""
        now = time.time()
        db.execute(
            "UPDATE notes SET text = ?, topic = ?, scope = ?, state = ?, reason = '', changed = ?, said = ? "
            "WHERE number = ?",
            (new, topic, scope, NoteState.ACTIVE, now, now, number),
        )
    if pinned is not None:
        db.execute("UPDATE notes SET pinned = ? WHERE number = ?", (pinned, number))
        if pinned and note.state is NoteState.RETIRED:
            _set_state(db, number, NoteState.ACTIVE)
    return load(db, number)


def remove(db: sqlite3.Connection, number: int, owner: str | None = None) -> Note:
    """Stop using a note; with `owner`, only if it is this owner's. Raises UnknownNote.

    Its row stays, so that what was answered under it can be explained; `forget` deletes it.
    """
    note = load(db, number, owner)
    _set_state(db, number, NoteState.REMOVED, BY_OWNER)
    return note


def forget(db: sqlite3.Connection, owner: str) -> int:
    """Delete all notes of an owner; how many there were."""
    return db.execute("DELETE FROM notes WHERE owner = ?", (owner,)).rowcount


def count(db: sqlite3.Connection) -> dict[NoteState, int]:
    """How many notes of all owners are active, and how many retired; without examples."""
    rows = db.execute("SELECT state, count(*) FROM notes WHERE question = '' GROUP BY state")
    counts = dict(rows.fetchall())
    return {state: counts.get(state, 0) for state in IN_USE}


def for_new_conversation(db: sqlite3.Connection, owner: str) -> list[Note]:
    """The notes and examples that a new conversation of an owner may have."""
    query = "SELECT * FROM notes WHERE owner = ? AND state IN (?, ?) ORDER BY number"
    return [_bare(row) for row in db.execute(query, (owner, *IN_USE))]


def stamp(db: sqlite3.Connection, owner: str) -> Stamp:
    """Differs whenever `for_new_conversation` or the notes that examples show may do.

    An example comes to show another note only when that note is written or said again.
    """
    query = (
        "SELECT count(*), total(number), total(changed), total(said), group_concat(number) FILTER (WHERE pinned) "
        "FROM notes WHERE owner = ? AND state IN (?, ?)"
    )
    return tuple(db.execute(query, (owner, *IN_USE)).fetchone())


def conversations(db: sqlite3.Connection, notes: Sequence[int]) -> dict[int, int]:
    """How many conversations had each of these notes so far."""
    query = f"SELECT number, conversations FROM notes WHERE number IN ({', '.join('?' * len(notes))})"
    return {row["number"]: row["conversations"] for row in db.execute(query, list(notes))}


def of_conversation(db: sqlite3.Connection, turn: int) -> tuple[int | None, list[ConversationNote]]:
    """The turn with which a turn's conversation began its notes, if it has any, and the notes."""
    row = db.execute("SELECT notes_from FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None or row["notes_from"] is None:
        return None, []
    rows = db.execute(
        "SELECT note, text, given, question FROM turn_notes WHERE turn = ? ORDER BY place", (row["notes_from"],)
    )
    return row["notes_from"], [
        ConversationNote(one["note"], one["text"], bool(one["given"]), one["question"]) for one in rows
    ]


def record(db: sqlite3.Connection, number: int, turn: Turn) -> None:
    """Store the notes of a conversation that begins with a turn, and the turn's prompt without notes."""
    if turn.notes:
        db.executemany(
            "UPDATE notes SET conversations = conversations + 1 WHERE number = ?",
            [(note.number,) for note in turn.notes],
        )
        db.execute("UPDATE turns SET notes_from = number WHERE number = ?", (number,))
        db.executemany(
            "INSERT INTO turn_notes (turn, place, note, text, given, question) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (number, place, note.number, note.text, note.given, note.question)
                for place, note in enumerate(turn.notes)
            ],
        )
    if turn.plain_ids is not None:
        prompt, plain = list(turn.prompt_ids), list(turn.plain_ids)
        start = common_prefix(prompt, plain)
        end = min(common_prefix(prompt[::-1], plain[::-1]), len(prompt) - start, len(plain) - start)
        db.execute(
            "INSERT INTO prompts_without_notes (turn, start, stop, added) VALUES (?, ?, ?, ?)",
            (number, start, len(prompt) - end, pack_ids(plain[start : len(plain) - end])),
        )


def openings(db: sqlite3.Connection, after: int) -> list[tuple[int, float]]:
    """Turns after a number with which conversations of people began, and when; without those judged already."""
    rows = db.execute(
        # The plus keeps SQLite from reading all turns that wait.
        "SELECT number, created FROM turns t WHERE number > ? AND parent IS NULL AND kind = ? AND +state IN (?, ?) "
        "AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.session = t.session) ORDER BY number",
        (after, TurnKind.MAIN, State.AWAITING, State.READY),
    )
    return [(row["number"], row["created"]) for row in rows]


def keep_asked(db: sqlite3.Connection, turn: int, wishes: Sequence[Wish]) -> None:
    """Keep the wishes in the request with which a conversation began, if the turn is still there."""
    row = db.execute(
        "SELECT s.owner FROM turns t JOIN sessions s ON s.number = t.session WHERE t.number = ?", (turn,)
    ).fetchone()
    for wish in wishes if row is not None else ():
        _keep(db, row["owner"], wish, turn, {})


def learn_from_verdict(db: sqlite3.Connection, turn: int, score: float | None, wishes: HeardWishes) -> None:
    """Learn from a verdict on a turn: count how the conversation's notes did, keep wishes and examples, retire notes.

    It is part of the transaction that records the verdict.
    """
    row = db.execute(
        "SELECT s.owner, t.notes_from FROM turns t JOIN sessions s ON s.number = t.session WHERE t.number = ?", (turn,)
    ).fetchone()
    if row["notes_from"] == turn:
        # Only the first answer of a conversation: later ones also follow what was said in between.
        note_outcomes.count(db, turn, score, wishes)
    keep_asked(db, turn, wishes.asked)
    was_given = {note.number: note.given for note in of_conversation(db, turn)[1]}
    for wish in wishes.replied:
        _keep(db, row["owner"], wish, turn, was_given)
    if score is not None and score < 0:
        examples.withdraw_accepted(db, turn)
        if wishes.wanted:
            examples.keep_correction(db, turn, wishes.wanted)
    elif score is not None and score > 0 and not wishes.replied and all(wishes.kept.values()):
        examples.keep_accepted(db, turn)
    if row["notes_from"] == turn:
        for number in note_outcomes.retirable(db, turn):
            _set_state(db, number, NoteState.RETIRED, DOES_WITHOUT)


def why_personal(db: sqlite3.Connection, turn: int, *, several: bool) -> str:
    """Why the notes of a turn must not be learned by all users; empty if they may, or if there is one user.

    With `several`, there are several users, whoever has talked to this server so far.
    """
    if not several and not several_owners(db):
        return ""
    _began, notes = of_conversation(db, turn)
    for note in notes:
        if note.given and (reason := _why_personal(db, note)):
            return reason
    return ""


def why_note_is_personal(db: sqlite3.Connection, note: Note, *, several: bool) -> str:
    """The same for a note itself."""
    if not several and not several_owners(db):
        return ""
    return _why_personal(db, ConversationNote(note.number, note.text, given=True))


def several_owners(db: sqlite3.Connection) -> bool:
    """Whether more than one user has talked to this server."""
    return len(db.execute("SELECT DISTINCT owner FROM sessions WHERE source != 'import' LIMIT 2").fetchall()) > 1


def contradicts(wish: Wish, note: Note) -> bool:
    """Whether a wish is about the same as a note, so that only one of them can stand."""
    return wish.replaces(Wish(note.text, note.topic, lasting=True, scope=note.scope))


def example_text(text: str) -> str:
    """A question or an answer of an example, as it is kept."""
    return whole_text(text.strip())[: examples.MAX_EXAMPLE_CHARACTERS].rstrip()


def one_line(text: str) -> str:
    return whole_text(" ".join(text.split()))[:MAX_NOTE_CHARACTERS].rstrip()


def _why_personal(db: sqlite3.Connection, note: ConversationNote) -> str:
    row = db.execute("SELECT owner, topic FROM notes WHERE number = ?", (note.number,)).fetchone()
    if row is None:
        return "its note was forgotten"
    if note.question:
        return "only one of several users has its example (--distil-personal)"
    wish, agrees = Wish(note.text, row["topic"], lasting=True), False
    for other in db.execute(
        "SELECT text, topic FROM notes WHERE owner != ? AND question = '' AND state IN (?, ?)", (row["owner"], *IN_USE)
    ):
        if other["text"] == note.text:
            agrees = True
        elif wish.replaces(Wish(other["text"], other["topic"], lasting=True)):
            return "another user wants the opposite of its note (--distil-personal)"
    return "" if agrees else "only one of several users has its note (--distil-personal)"


def _keep(db: sqlite3.Connection, owner: str, wish: Wish, turn: int, was_given: Mapping[int, bool]) -> None:
    """Write a note of a wish, unless there is one. It replaces notes that it contradicts, except pinned ones.

    What was said last counts, whenever it is judged: an older wish changes nothing, and neither does one from before
    the owner removed a note of its topic. A wish that takes notes back removes them; it is a note itself if there are
    none, because the model then does so by itself. A note that the wish names may have been said at the same time.

    `was_given` has the notes of the conversation, if the wish complains about an answer. If a note of the same topic
    was withheld from that answer, the complaint repeats the note, in whatever words. If the same note was given and
    did not help, the note becomes the stronger instruction. A stronger one stays.
    """
    text, stronger = one_line(wish.instruction), one_line(wish.stronger)
    if not wish.lasting or not (text or wish.instead_of):
        return
    everything = [_bare(row) for row in _in_any_state(db, owner)]
    named = [note for note in everything if note.number in wish.instead_of]
    undone = [note for note in everything if note.topic and wish.takes_back(note.text)] if text else named
    related = [note for note in everything if note in undone or note in named or contradicts(wish, note)]
    times = {note.number: note.changed if note.reason == BY_OWNER else note.said for note in related}
    if any(wish.said < when or (wish.said == when and number not in wish.instead_of) for number, when in times.items()):
        return
    older = [note for note in related if note.state in IN_USE]
    if any(note.pinned for note in older):
        return
    if undone := [note for note in older if note in undone]:
        for note in undone:
            _set_state(db, note.number, NoteState.REMOVED, TAKEN_BACK)
            _say(db, note.number, wish.said)
    if undone or not text:
        return
    if stronger and any(note.text == text and was_given.get(note.number) for note in older):
        text = stronger
    wordings = (text, stronger)
    same = next((note for note in older if note.text in wordings or was_given.get(note.number) is False), None)
    if same is None:
        number = _insert(db, owner, text, wish.topic, turn, wish.said, scope=wish.scope)
    else:
        number = same.number
        _say(db, number, wish.said)
        if same.state is NoteState.RETIRED:
            _set_state(db, number, NoteState.ACTIVE)
            for example in examples.retired(db, number):
                _set_state(db, example, NoteState.ACTIVE)
    _replace(db, [note for note in older if note.number != number], number)
    examples.link_note(db, number, turn)
    active = [note for note in _active(db, owner) if not note.pinned]
    for note in active[: max(0, len(_active(db, owner)) - MAX_NOTES)]:
        _set_state(db, note.number, NoteState.REMOVED, TOO_MANY)


def _replace(db: sqlite3.Connection, older: Sequence[Note], number: int) -> None:
    """Remove notes that a new note makes void."""
    for note in older:
        _set_state(db, note.number, NoteState.REMOVED, f"{examples.REPLACED}{number}")


def _leave_examples(db: sqlite3.Connection, note: Note) -> None:
    """Leave the examples of a note that its owner changes with what it said, as a note that was replaced."""
    if db.execute("SELECT 1 FROM example_notes WHERE note = ?", (note.number,)).fetchone():
        old = _insert(db, note.owner, note.text, note.topic, note.turn, note.said, scope=note.scope)
        db.execute("UPDATE example_notes SET note = ? WHERE note = ?", (old, note.number))
        _set_state(db, old, NoteState.REMOVED, f"{examples.REPLACED}{note.number}")


def _insert(
    db: sqlite3.Connection,
    owner: str,
    text: str,
    topic: str,
    turn: int | None,
    said: float,
    *,
    pinned: bool = False,
    question: str = "",
    scope: str = "",
) -> int:
    now = time.time()
    origin = NoteOrigin.WRITTEN if turn is None else NoteOrigin.SAID
    row = db.execute(
        "INSERT INTO notes (owner, text, topic, turn, created, said, state, changed, pinned, origin, question, scope) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING number",
        (owner, text, whole_text(topic), turn, now, said, NoteState.ACTIVE, now, pinned, origin, question, scope),
    ).fetchone()
    return int(row["number"])


def _say(db: sqlite3.Connection, number: int, when: float) -> None:
    db.execute("UPDATE notes SET said = ? WHERE number = ?", (when, number))


def _set_state(db: sqlite3.Connection, number: int, state: NoteState, reason: str = "") -> None:
    db.execute(
        "UPDATE notes SET state = ?, reason = ?, changed = ? WHERE number = ? AND state != ?",
        (state, reason, time.time(), number, state),
    )


def _in_any_state(db: sqlite3.Connection, owner: str) -> list[sqlite3.Row]:
    return db.execute("SELECT * FROM notes WHERE owner = ? AND question = '' ORDER BY number", (owner,)).fetchall()


def _in_use(db: sqlite3.Connection, owner: str) -> list[sqlite3.Row]:
    return [row for row in _in_any_state(db, owner) if row["state"] in IN_USE]


def _active(db: sqlite3.Connection, owner: str) -> list[Note]:
    return [_bare(row) for row in _in_use(db, owner) if row["state"] == NoteState.ACTIVE]


def _note(db: sqlite3.Connection, row: sqlite3.Row) -> Note:
    counts = {
        bool(one["given"]): NoteOutcomes(one["held"], one["total"] - one["held"])
        for one in db.execute(
            "SELECT given, sum(held) AS held, count(*) AS total FROM note_outcomes WHERE note = ? GROUP BY given",
            (row["number"],),
        )
    }
    return _bare(row, counts.get(True, NO_OUTCOMES), counts.get(False, NO_OUTCOMES))


def _bare(row: sqlite3.Row, given: NoteOutcomes = NO_OUTCOMES, withheld: NoteOutcomes = NO_OUTCOMES) -> Note:
    """A note, with its outcomes if they are given."""
    return Note(
        row["number"],
        row["owner"],
        row["text"],
        row["topic"],
        row["turn"],
        row["created"],
        row["said"],
        known(NoteState, row["state"], NoteState.REMOVED),
        row["reason"],
        row["changed"],
        bool(row["pinned"]),
        given,
        withheld,
        known(NoteOrigin, row["origin"], NoteOrigin.SAID),
        row["question"],
        row["scope"],
    )

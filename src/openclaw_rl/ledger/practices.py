"""Practice: which notes are due for it, and the answers that are practised."""

import sqlite3
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any
from uuid import uuid4

from openclaw_rl.ledger import notes, verdicts
from openclaw_rl.ledger.errors import CannotPractise, DamagedTurn
from openclaw_rl.ledger.groups import OF_LINE
from openclaw_rl.ledger.packing import known, unpack_message
from openclaw_rl.ledger.sessions import IMPORTED, PRACTISED, load_messages, move
from openclaw_rl.ledger.training import policy_line
from openclaw_rl.ledger.turns import record_turn
from openclaw_rl.rendering.chat import content_text
from openclaw_rl.types import (
    BASE_VERSION,
    ENDED_PRACTICE,
    SHARED,
    Continuation,
    Hint,
    Note,
    NoteOutcomes,
    NoteState,
    Practice,
    PracticedAnswer,
    PracticePrompt,
    PracticeState,
    SampleKind,
    SamplingParams,
    SessionKey,
    Source,
    State,
    StepOutcome,
    Turn,
    TurnKind,
    Verdict,
)

#: Imitated answers of a step, besides anchors. 24 steps of 8 teach as well as 20 of 24 (docs/results/wishes.md).
BATCH = 8
#: The policy's own answers of a step, with anchors. They are compared with each other, so there must be more.
OWN_BATCH = 16
#: A note is practised once this many reactions show that the model keeps to it with its context, in at least half.
MIN_REACTIONS = 4
#: So many people, and more than half of all, make a wish everybody's.
MIN_SHARING = 3
#: The most characters of a first message that is practised with, and how many are looked at.
MAX_QUESTION_CHARACTERS = 400
MAX_QUESTIONS = 400
#: Why a note is retired after practice.
LEARNED = "learned for good"


def request(db: sqlite3.Connection, note: int, owner: str | None = None) -> Practice:
    """Let a note be practised, whatever its reactions were; with `owner`, only a note of this owner.

    A practice of it that is under way is returned instead of a second one. Raises UnknownNote and CannotPractise.
    """
    wanted = notes.load(db, note, owner)
    if wanted.question:
        raise CannotPractise(f"{note} is an example: practise the note that it shows.")
    return _under_way(db, note) or _add(db, wanted, by_hand=True)


def stop(db: sqlite3.Connection, note: int, owner: str | None = None) -> Practice:
    """End the practice of a note that waits or runs; with `owner`, only of a note of this owner.

    A step that is being made still counts. Raises UnknownNote and CannotPractise.
    """
    notes.load(db, note, owner)
    found = _under_way(db, note)
    if found is None:
        raise CannotPractise(f"Note {note} is not being practised.")
    set_state(db, found.number, PracticeState.STOPPED, notes.BY_OWNER)
    return load(db, found.number)


def _under_way(db: sqlite3.Connection, note: int) -> Practice | None:
    return next((one for one in load_all(db, note) if one.state not in ENDED_PRACTICE), None)


def add_due(db: sqlite3.Connection, *, lines: bool) -> Practice | None:
    """Let the first note be practised that is due for it, if there is one.

    It is one that the model keeps to with its context, and that was not practised since it got its text. Where people
    have lines of their own, the shared line first practises what most people wish.
    """
    if lines and (common := add_common(db)):
        return _add(db, common, by_hand=False)
    for note in notes.of_owner(db):
        if _is_kept(db, note) and not any(one.created >= note.changed for one in load_all(db, note.number)):
            return _add(db, note, by_hand=False)
    return None


def _is_kept(db: sqlite3.Connection, note: Note) -> bool:
    """Whether reactions show that the model keeps to an active note with its context."""
    if note.state is not NoteState.ACTIVE or note.pinned:
        return False
    heard = reactions(db, note)
    return heard.total >= MIN_REACTIONS and 2 * heard.held >= heard.total


def add_common(db: sqlite3.Connection) -> Note | None:
    """Give the shared line the first wish that most people have and that it has not had yet; None without one.

    Most are more than half of those who have talked to this server, and at least `MIN_SHARING`. They must have the wish
    in the same words, up to capitals and the full stop, so nobody's other words get into the shared line. It is
    practised with questions that come with the program, because that line has no conversations of its own.
    """
    rows = db.execute("SELECT DISTINCT owner FROM sessions WHERE owner NOT IN (?, ?)", (SHARED, IMPORTED))
    people = {row["owner"] for row in rows}
    had = {_wording(note) for note in notes.of_owner(db, SHARED, all_states=True)}
    wishing: dict[str, set[str]] = {}
    for note in notes.of_owner(db):
        if note.owner in people and (note.reason == LEARNED or _is_kept(db, note)):
            owners = wishing.setdefault(_wording(note), set())
            owners.add(note.owner)
            if len(owners) >= MIN_SHARING and 2 * len(owners) > len(people) and _wording(note) not in had:
                return notes.add(db, SHARED, note.text, scope=note.scope)
    return None


def _wording(note: Note) -> str:
    return f"{note.text}|{note.scope}".casefold().replace(".|", "|")


def reactions(db: sqlite3.Connection, note: Note) -> NoteOutcomes:
    """How first answers that were given with a note or with examples of it were received, each counted once."""
    rows = db.execute(
        "SELECT min(held) AS held FROM note_outcomes WHERE given AND created >= ? AND (note = ? OR note IN "
        "(SELECT example FROM example_notes WHERE note = ?)) GROUP BY turn",
        (note.changed, note.number, note.number),
    ).fetchall()
    held = sum(row["held"] for row in rows)
    return NoteOutcomes(held, len(rows) - held)


def _add(db: sqlite3.Connection, note: Note, *, by_hand: bool) -> Practice:
    number = db.execute(
        "INSERT INTO practices (owner, note, state, by_hand, created) VALUES (?, ?, ?, ?, ?) RETURNING number",
        (note.owner, note.number, PracticeState.WAITING, by_hand, time.time()),
    ).fetchone()["number"]
    return load(db, number)


def start(db: sqlite3.Connection, number: int, steps: int, *, personal: bool, several: bool) -> Practice:
    """Begin a practice, or go on with it: it has so many steps, unless it began with another number.

    Raises CannotPractise if the note is one user's own matter and `several` share the policy, unless `personal`.
    """
    found = load(db, number)
    if not personal and (reason := notes.why_note_is_personal(db, notes.load(db, found.note), several=several)):
        raise CannotPractise(reason)
    db.execute(
        "UPDATE practices SET state = ?, steps = coalesce(nullif(steps, 0), ?) WHERE number = ?",
        (PracticeState.RUNNING, steps, number),
    )
    return load(db, number)


def load(db: sqlite3.Connection, number: int) -> Practice:
    """A practice. Raises CannotPractise if it was deleted with its note."""
    row = db.execute("SELECT * FROM practices WHERE number = ?", (number,)).fetchone()
    if row is None:
        raise CannotPractise("Its note was deleted.")
    return _practice(db, row)


def load_all(db: sqlite3.Connection, note: int | None = None) -> list[Practice]:
    """All practices, or those of a note, the newest first."""
    rows = db.execute("SELECT * FROM practices WHERE coalesce(?, note) = note ORDER BY number DESC", (note,)).fetchall()
    return [_practice(db, row) for row in rows]


def latest(db: sqlite3.Connection, owner: str | None = None) -> dict[int, Practice]:
    """The last practice of each note that has one, of one owner or of all.

    One that ended before a note got its text, or before its owner wished it again, is left out.
    """
    rows = db.execute(
        "SELECT p.* FROM practices p JOIN notes n ON n.number = p.note WHERE p.number IN "
        "(SELECT max(number) FROM practices WHERE coalesce(?, owner) = owner GROUP BY note) "
        "AND (n.state != ? OR p.ended IS NULL OR p.ended >= n.changed)",
        (owner, NoteState.ACTIVE),
    ).fetchall()
    return {row["note"]: _practice(db, row) for row in rows}


def current(db: sqlite3.Connection) -> Practice | None:
    """The practice to go on with: one that runs, then the first that waits."""
    row = db.execute(
        "SELECT * FROM practices WHERE state IN (?, ?) ORDER BY state = ? DESC, number LIMIT 1",
        (PracticeState.RUNNING, PracticeState.WAITING, PracticeState.RUNNING),
    ).fetchone()
    return None if row is None else _practice(db, row)


def set_state(db: sqlite3.Connection, number: int, state: PracticeState, reason: str = "") -> None:
    """Change a practice that has not ended; one that has stays as it is.

    What was learned for good retires its note, unless it is pinned. If it is stopped, its answers that no step has
    taken are dropped.
    """
    ended = time.time() if state in ENDED_PRACTICE else None
    changed = db.execute(
        "UPDATE practices SET state = ?, reason = ?, ended = ? WHERE number = ? AND ended IS NULL",
        (state, reason, ended, number),
    )
    if not changed.rowcount:
        return
    if state is PracticeState.STOPPED:
        query = (
            "SELECT t.number FROM practised p JOIN turns t ON t.number = p.turn WHERE p.practice = ? AND t.state = ?"
        )
        for row in db.execute(query, (number, State.JUDGED)).fetchall():
            move(db, row["number"], State.DROPPED, "its practice was stopped")
    if state is PracticeState.LEARNED:
        db.execute(
            "UPDATE notes SET state = ?, reason = ?, changed = ? WHERE NOT pinned AND state = ? AND number = "
            "(SELECT note FROM practices WHERE number = ?)",
            (NoteState.RETIRED, LEARNED, time.time(), NoteState.ACTIVE, number),
        )


def questions(db: sqlite3.Connection, owner: str) -> list[PracticePrompt]:
    """The first messages of an owner's conversations that can be practised with, the newest first, each once."""
    rows = db.execute(
        "SELECT max(t.number) AS number, t.request FROM turns t JOIN sessions s ON s.number = t.session "
        "WHERE s.owner = ? AND t.parent IS NULL AND t.kind = ? GROUP BY t.session ORDER BY 1 DESC LIMIT ?",
        (owner, TurnKind.MAIN, MAX_QUESTIONS),
    ).fetchall()
    found: dict[str, PracticePrompt] = {}
    for row in rows:
        try:
            messages = load_messages(db, row["number"], row["request"])
        except DamagedTurn:
            continue
        text = content_text(messages[-1].get("content")).strip() if is_plain(messages) else ""
        if text and len(text) <= MAX_QUESTION_CHARACTERS:
            found.setdefault(text, PracticePrompt(text, row["number"]))
    return list(found.values())


def is_plain(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether a conversation begins with one message of its user, as text, and nothing else."""
    return len(messages) == 1 and messages[0]["role"] == "user" and isinstance(messages[0].get("content"), str)


def add_answers(db: sqlite3.Connection, practice: Practice, answers: Sequence[PracticedAnswer]) -> list[int]:
    """Record answers to be trained on; their turns. Raises CannotPractise if the practice has ended meanwhile."""
    now = load(db, practice.number)
    if now.state in ENDED_PRACTICE:
        raise CannotPractise(now.reason)
    return [_add_answer(db, practice, answer) for answer in answers]


def _add_answer(db: sqlite3.Connection, practice: Practice, answer: PracticedAnswer) -> int:
    id = f"practice-{uuid4().hex}"
    asked = answer.prompt.turn
    if asked is not None and db.execute("SELECT 1 FROM turns WHERE number = ?", (asked,)).fetchone() is None:
        raise CannotPractise("A message that it practises with was deleted meanwhile.")
    origin = "a question that comes with the program" if asked is None else f"your message of turn {asked}"
    purpose = "keep other answers as they were beside" if answer.is_anchor else "practise"
    turn = Turn(
        completion=id,
        choice=0,
        session=SessionKey(practice.owner, id),
        kind=TurnKind.SIDE,
        kind_reason=f"made to {purpose} note {practice.note}, from {origin}",
        version=answer.version,
        messages=[{"role": "user", "content": answer.prompt.text}],
        message={"role": "assistant", "content": answer.text},
        prompt_ids=list(answer.prompt_ids),
        response_ids=answer.response_ids,
        logprobs=answer.logprobs,
        sampling=SamplingParams(max_tokens=len(answer.response_ids)),
        finish_reason="stop" if answer.ended else "length",
        continuation=Continuation.NEW,
        parent=None,
        request_key=id.encode(),
        end_key=id.encode(),
    )
    number = record_turn(db, turn, PRACTISED, None, 0, State.JUDGED)
    taught = (Hint(turn.kind_reason, answer.teacher_logprobs),) if answer.teacher_logprobs else ()
    verdict = Verdict(answer.score, Source.PRACTICE, taught, reason=turn.kind_reason)
    verdicts.store(db, number, verdict, SampleKind.PRACTICE)
    db.execute(
        "INSERT INTO practised (turn, practice, asked, anchor) VALUES (?, ?, ?, ?)",
        (number, practice.number, asked, answer.is_anchor),
    )
    db.execute("UPDATE sessions SET closed = last, settled = 1 WHERE owner = ? AND id = ?", turn.session)
    return number


def to_train(db: sqlite3.Connection, line: str | None) -> list[int]:
    """The practised answers that the next step is to take; with `line`, its next step."""
    query = f"SELECT t.number FROM turns t WHERE t.state = ?2 AND t.kind = ?3 AND {OF_LINE} ORDER BY t.number LIMIT ?4"
    return [row["number"] for row in db.execute(query, (line, State.JUDGED, TurnKind.SIDE, OWN_BATCH))]


def begun_from(db: sqlite3.Connection, practice: int, version: int) -> int | None:
    """The policy from which a practice made `version`; None if other steps, or none of its own, lie between them."""
    query = (
        "SELECT DISTINCT s.version FROM updates s JOIN update_turns u ON u.number = s.number "
        "JOIN practised p ON p.turn = u.turn WHERE p.practice = ? AND s.outcome = ?"
    )
    own = {row["version"] for row in db.execute(query, (practice, StepOutcome.APPLIED))}
    made_from = policy_line(db, version)
    later = list(takewhile(own.__contains__, made_from))
    before = made_from[len(later) :]
    return None if not later or own & set(before) else next(iter(before), BASE_VERSION)


def states(db: sqlite3.Connection, turns: Sequence[int]) -> list[State]:
    """The states of practised answers that were not deleted."""
    query = f"SELECT state FROM turns WHERE number IN ({', '.join('?' * len(turns))})"
    return [known(State, row["state"], State.DROPPED) for row in db.execute(query, list(turns))]


def is_practised(db: sqlite3.Connection, turns: Sequence[int]) -> bool:
    """Whether these turns are practised answers."""
    query = "SELECT kind FROM turns WHERE number = ?"
    row = db.execute(query, (turns[0],)).fetchone() if turns else None
    return row is not None and row["kind"] == TurnKind.SIDE


def answers(db: sqlite3.Connection, practice: int) -> list[tuple[str, str]]:
    """The questions and answers that were imitated so far, without anchors."""
    rows = db.execute(
        "SELECT t.number, t.request, t.answer FROM practised p JOIN turns t ON t.number = p.turn "
        "JOIN verdicts v ON v.turn = p.turn WHERE p.practice = ? AND NOT p.anchor AND v.score IS NULL ORDER BY p.turn",
        (practice,),
    ).fetchall()
    found = []
    for row in rows:
        try:
            asked = content_text(load_messages(db, row["number"], row["request"])[-1].get("content"))
            found.append((asked, content_text(unpack_message(row["answer"]).get("content"))))
        except (DamagedTurn, ValueError, TypeError, RecursionError):
            continue
    return found


def sessions_practised_from(db: sqlite3.Connection, turns: Sequence[int]) -> list[int]:
    """The sessions of practised answers to the messages of these turns, or for notes that were said after them."""
    query = "SELECT t.session FROM practised p JOIN turns t ON t.number = p.turn WHERE p.asked = ?"
    asked = [row["session"] for turn in turns for row in db.execute(query, (turn,))]
    said = [row["number"] for turn in turns for row in db.execute("SELECT number FROM notes WHERE turn = ?", (turn,))]
    return [*asked, *sessions_practised_for(db, said)]


def sessions_practised_for(db: sqlite3.Connection, notes: Sequence[int]) -> list[int]:
    """The sessions of practised answers for these notes."""
    query = (
        "SELECT t.session FROM practices c JOIN practised p ON p.practice = c.number "
        "JOIN turns t ON t.number = p.turn WHERE c.note = ?"
    )
    return [row["session"] for note in notes for row in db.execute(query, (note,))]


def sessions_of(db: sqlite3.Connection, owner: str) -> list[int]:
    """The sessions of all practised answers for an owner's notes."""
    rows = db.execute("SELECT number FROM sessions WHERE owner = ? AND source = ?", (owner, PRACTISED))
    return [row["number"] for row in rows]


def _practice(db: sqlite3.Connection, row: sqlite3.Row) -> Practice:
    (made,) = db.execute(
        "SELECT count(DISTINCT u.number) FROM practised p JOIN update_turns x ON x.turn = p.turn "
        "JOIN updates u ON u.number = x.number WHERE p.practice = ? AND u.outcome = ?",
        (row["number"], StepOutcome.APPLIED),
    ).fetchone()
    return Practice(
        row["number"],
        row["owner"],
        row["note"],
        known(PracticeState, row["state"], PracticeState.STOPPED),
        row["reason"],
        bool(row["by_hand"]),
        row["steps"],
        made,
        row["created"],
        row["ended"],
    )

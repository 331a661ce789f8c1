"""How often notes were kept to in the first answers of conversations, and when the policy does without one."""

import math
import sqlite3
import time

from openclaw_rl.types import HeardWishes, NoteOutcomes, NoteState, Wish

#: The test compares at most this many of the newest outcomes of each kind: the policy changes, and old ones say little.
RECENT_OUTCOMES = 16
#: The policy without the note may please less often by this share at most.
MARGIN = 0.2
#: The probability that a note is retired although the policy is worse without it by the margin.
LEVEL = 0.05
#: The quantile of the normal distribution at 1 - LEVEL.
_QUANTILE = 1.6449


def count(db: sqlite3.Connection, turn: int, score: float | None, wishes: HeardWishes) -> None:
    """Record for each note of a conversation whether its first answer kept to it and was accepted.

    A complaint about something else says nothing about the note, and neither does an accepted answer that cannot be
    checked. An example is complained about with a note that it shows, and when the user writes the answer that they
    wanted; it holds if the answer is accepted.
    """
    db.execute("DELETE FROM note_outcomes WHERE turn = ?", (turn,))
    for row in db.execute(
        "SELECT t.note, t.text, t.given, n.topic, n.scope FROM turn_notes t JOIN notes n ON n.number = t.note "
        "WHERE t.turn = ?",
        (turn,),
    ).fetchall():
        note = Wish(row["text"], row["topic"], lasting=True, scope=row["scope"])
        about = [note] if row["topic"] else shown_wishes(db, row["note"])
        kept = wishes.kept.get(row["note"]) if row["topic"] else True
        complained = any(row["note"] in wish.instead_of or any(map(wish.replaces, about)) for wish in wishes.replied)
        complained = complained or (not row["topic"] and bool(wishes.wanted))
        if complained or (kept is not None and score is not None and score > 0):
            db.execute(
                "INSERT INTO note_outcomes (turn, note, given, held, created) VALUES (?, ?, ?, ?, ?)",
                (turn, row["note"], row["given"], bool(kept and not complained), time.time()),
            )


def shown_wishes(db: sqlite3.Connection, example: int) -> list[Wish]:
    """What the notes say that an example shows."""
    rows = db.execute(
        "SELECT n.text, n.topic, n.scope FROM example_notes l JOIN notes n ON n.number = l.note WHERE l.example = ?",
        (example,),
    )
    return [Wish(row["text"], row["topic"], lasting=True, scope=row["scope"]) for row in rows]


def retirable(db: sqlite3.Connection, turn: int) -> list[int]:
    """The notes of a conversation without which the policy pleases as often as with them."""
    rows = db.execute(
        "SELECT n.* FROM turn_notes t JOIN notes n ON n.number = t.note WHERE t.turn = ? AND n.state = ? "
        "AND NOT n.pinned",
        (turn, NoteState.ACTIVE),
    ).fetchall()
    return [row["number"] for row in rows if does_without(recent(db, row, given=True), recent(db, row, given=False))]


def does_without(given: NoteOutcomes, withheld: NoteOutcomes) -> bool:
    """Whether the policy pleases without a note as often as with it.

    It is a one-sided test of non-inferiority at LEVEL: the lower end of Newcombe's interval for the difference of the
    two shares, made from Wilson's intervals, must be above -MARGIN.
    """
    if not given.total or not withheld.total:
        return False
    with_note, without_note = given.held / given.total, withheld.held / withheld.total
    lowest = wilson(without_note, withheld.total)[0]
    highest = wilson(with_note, given.total)[1]
    distance = math.hypot(without_note - lowest, highest - with_note)
    return without_note - with_note - distance > -MARGIN


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval for a share of `count` outcomes; each end is missed with a probability of LEVEL."""
    z2 = _QUANTILE**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = _QUANTILE / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return middle - half, middle + half


def recent(db: sqlite3.Connection, row: sqlite3.Row, *, given: bool) -> NoteOutcomes:
    """The newest outcomes of a note since it became what it is."""
    rows = db.execute(
        "SELECT held FROM note_outcomes WHERE note = ? AND given = ? AND created >= ? ORDER BY created DESC LIMIT ?",
        (row["number"], given, row["changed"], RECENT_OUTCOMES),
    ).fetchall()
    held = sum(one["held"] for one in rows)
    return NoteOutcomes(held, len(rows) - held)

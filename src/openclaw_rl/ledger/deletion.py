"""Deletes single answers, and finishes the deletion of whole sessions, which `episodes.forget` begins."""

import sqlite3
from collections.abc import Iterable

from openclaw_rl.ledger import queries
from openclaw_rl.ledger.errors import CannotDelete
from openclaw_rl.ledger.packing import pack_ids
from openclaw_rl.types import State


def delete_answer(db: sqlite3.Connection, owner: str, completion: str) -> None:
    """Delete an owner's answer with its request, its tokens, its verdict and what came next.

    - Messages that other answers of the conversation were given too stay with those.
    - Nothing else changes: a turn that shares tokens with the deleted one keeps them as its own.

    Raises UnknownTurn; CannotDelete if later turns contain the answer, or if it is being trained on or is part of an
    episode.
    """
    numbers = queries.turns_of(db, owner, completion)
    for number in numbers:
        check_deletable(db, number, completion)
    for number in numbers:
        keep_shared_tokens(db, number)
        request, session = db.execute("SELECT request, session FROM turns WHERE number = ?", (number,)).fetchone()
        db.execute("DELETE FROM turns WHERE number = ?", (number,))
        delete_unused_messages(db, request)
        db.execute(
            "DELETE FROM sessions WHERE number = ? AND NOT EXISTS (SELECT 1 FROM turns WHERE session = ?)",
            (session, session),
        )


def check_deletable(db: sqlite3.Connection, number: int, completion: str) -> None:
    row = db.execute(
        "SELECT state, EXISTS (SELECT 1 FROM turns c WHERE c.parent = t.number) AS continued,"
        " EXISTS (SELECT 1 FROM episodes e WHERE e.session = t.session) AS in_episode"
        " FROM turns t WHERE number = ?",
        (number,),
    ).fetchone()
    if row["continued"]:
        raise CannotDelete(
            f"Later turns of the conversation contain {completion}: delete those first, or the whole session with "
            "openclaw-rl forget."
        )
    if row["state"] == State.BATCHED:
        raise CannotDelete(f"{completion} is being trained on: try again later.")
    if row["in_episode"]:
        raise CannotDelete(
            f"{completion} is part of an episode, which is only deleted as a whole (openclaw-rl forget)."
        )


def keep_shared_tokens(db: sqlite3.Connection, number: int) -> None:
    """Give the turns that are stored as an addition to this one all their tokens."""
    tokens, _prompt_length = queries.sequence(db, number)
    for row in db.execute("SELECT number, keep, added FROM turns WHERE base = ?", (number,)).fetchall():
        added = pack_ids(tokens[: row["keep"]]) + row["added"]
        db.execute("UPDATE turns SET base = NULL, keep = 0, added = ? WHERE number = ?", (added, row["number"]))


def delete_unused_messages(db: sqlite3.Connection, last: int | None) -> None:
    """Delete a message and those before it, up to the first that another turn was given too."""
    while last is not None:
        row = db.execute("SELECT parent FROM messages WHERE number = ?", (last,)).fetchone()
        used = db.execute(
            "SELECT EXISTS (SELECT 1 FROM turns WHERE request = ?) OR EXISTS (SELECT 1 FROM messages WHERE parent = ?)",
            (last, last),
        ).fetchone()[0]
        if used:
            return
        db.execute("DELETE FROM messages WHERE number = ?", (last,))
        last = row["parent"]


def unfinished(db: sqlite3.Connection) -> list[str]:
    """The ids of deleted sessions that may still be in files."""
    return [row["session"] for row in db.execute("SELECT session FROM unfinished_deletions ORDER BY number")]


def finish(db: sqlite3.Connection, sessions: Iterable[str]) -> None:
    """Delete the ids of deleted sessions, which are no longer in any file."""
    db.executemany("DELETE FROM unfinished_deletions WHERE session = ?", [(session,) for session in sessions])

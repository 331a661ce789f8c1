"""Deletes single answers and whole sessions, for good."""

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from openclaw_rl.ledger import groups
from openclaw_rl.ledger.errors import CannotDelete
from openclaw_rl.ledger.packing import known, packed_sequence, unpack_messages
from openclaw_rl.ledger.practices import sessions_practised_for, sessions_practised_from
from openclaw_rl.ledger.schema import transaction
from openclaw_rl.ledger.sessions import move
from openclaw_rl.ledger.turns import turns_of
from openclaw_rl.rendering.clients import message_words
from openclaw_rl.types import State

#: Not the same command again: the beginning of a deleted session's id may be that of another one.
WIPE_LATER = "run 'openclaw-rl forget --wipe' again"
#: Why a turn is not trained on whose next state was deleted.
DELETED = "what came next was deleted"
#: SQLite rewrites a file of this size in about a second, for which a server's requests can wait.
MAX_BYTES_REWRITTEN_BESIDE_SERVER = 256 << 20


def delete_answer(db: sqlite3.Connection, owner: str, completion: str) -> None:
    """Delete an owner's answer with its request, its tokens, its verdict and what came next.

    - The words of the request also go where they were the next state of an earlier turn, with the verdict, the hints
      and the notes that were made of them. A turn that was not trained on yet is then not trained on.
    - Messages that other answers of the conversation were given too stay with those.
    - Answers that were practised with its request, or for those notes, go too.
    - Nothing else changes: a turn that shares tokens with the deleted one keeps them as its own.

    Raises UnknownTurn; CannotDelete if later turns contain the answer, or if it, or the turn that its request reacted
    to, is being trained on, or if it is part of an episode.
    """
    numbers = turns_of(db, owner, completion)
    for number in numbers:
        check_deletable(db, number, completion)
    if practised := sessions_practised_from(db, numbers):
        delete_sessions(db, practised)
    for number in numbers:
        keep_shared_tokens(db, number)
        request, session = db.execute("SELECT request, session FROM turns WHERE number = ?", (number,)).fetchone()
        db.execute("DELETE FROM turns WHERE number = ?", (number,))
        if said := delete_unused_messages(db, request):
            forget_reactions(db, session, said, completion)
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
    for row in db.execute("SELECT number, keep, added FROM turns WHERE base = ?", (number,)).fetchall():
        added = packed_sequence(db, number)[0][: 4 * row["keep"]] + row["added"]
        db.execute("UPDATE turns SET base = NULL, keep = 0, added = ? WHERE number = ?", (added, row["number"]))


def delete_unused_messages(db: sqlite3.Connection, last: int | None) -> list[str]:
    """Delete a message and those before it, up to the first that another turn was given too; what they said."""
    said = list[str]()
    while last is not None:
        row = db.execute("SELECT parent, body FROM messages WHERE number = ?", (last,)).fetchone()
        used = db.execute(
            "SELECT EXISTS (SELECT 1 FROM turns WHERE request = ?) OR EXISTS (SELECT 1 FROM messages WHERE parent = ?)",
            (last, last),
        ).fetchone()[0]
        if used:
            break
        db.execute("DELETE FROM messages WHERE number = ?", (last,))
        said += words_in(f"[{row['body']}]")
        last = row["parent"]
    return said


def forget_reactions(db: sqlite3.Connection, session: int, said: Sequence[str], completion: str) -> None:
    """Remove what deleted messages said from the turns of their session that it was the next state of."""
    rows = db.execute("SELECT body FROM messages WHERE session = ?", (session,))
    kept = {words for row in rows for words in words_in(f"[{row['body']}]")}
    gone = [words for words in said if words and words not in kept]
    for row in db.execute(
        "SELECT number, state, next_state FROM turns WHERE session = ? AND next_state IS NOT NULL", (session,)
    ).fetchall():
        # A client that merges messages has said a next state as the end of a longer message.
        heard = [words for words in words_in(row["next_state"]) if words]
        if not any(words.endswith(one) for words in gone for one in heard if one not in kept):
            continue
        if row["state"] == State.BATCHED:
            raise CannotDelete(f"The turn before {completion} is being trained on: try again later.")
        forget_next_state(db, row["number"], known(State, row["state"], State.DROPPED))


def forget_next_state(db: sqlite3.Connection, turn: int, state: State) -> None:
    """Remove a turn's next state, and what was made of it. Explicit feedback stays and is judged again."""
    db.execute("UPDATE turns SET next_state = NULL WHERE number = ?", (turn,))
    # What the turn's own request asked for stays: that was said when the turn began. So does a correction.
    rows = db.execute(
        "SELECT number FROM notes WHERE turn = ? AND said != (SELECT created FROM turns WHERE number = ?) "
        "AND NOT (question != '' AND text IN (SELECT correction FROM feedback WHERE turn = ?))",
        (turn, turn, turn),
    ).fetchall()
    if practised := sessions_practised_for(db, [row["number"] for row in rows]):
        delete_sessions(db, practised)
    db.executemany("DELETE FROM notes WHERE number = ?", [tuple(row) for row in rows])
    db.execute("DELETE FROM hints WHERE turn = ?", (turn,))
    if state is State.APPLIED:
        # What it was trained on is still explained by the score.
        db.execute("UPDATE verdicts SET votes = '[]', reason = ? WHERE turn = ?", (DELETED, turn))
        return
    db.execute("DELETE FROM verdicts WHERE turn = ?", (turn,))
    if state is State.JUDGED and db.execute("SELECT 1 FROM feedback WHERE turn = ?", (turn,)).fetchone():
        move(db, turn, State.READY)
    elif state in (State.JUDGED, State.READY):
        move(db, turn, State.DROPPED, DELETED)


def words_in(messages: str) -> list[str]:
    """The words of each of these messages; none if they are damaged."""
    try:
        return [message_words(message) for message in unpack_messages(messages) or ()]
    except (ValueError, TypeError, RecursionError):
        return []


def delete_sessions(db: sqlite3.Connection, sessions: Sequence[int]) -> list[int]:
    """Delete sessions with everything in them; the numbers of their turns.

    Answers that were practised with their messages, or for notes that were said in them, go too. Their ids stay until
    `wipe`: files may still have them.
    The groups of deleted attempts are as if these had never been made: smaller, and with means of the others.
    """
    numbers = turns_in(db, sessions)
    if practised := set(sessions_practised_from(db, numbers)) - set(sessions):
        numbers += delete_sessions(db, sorted(practised))
    marks = ", ".join("?" * len(sessions))
    attempts = db.execute(
        f"SELECT group_number FROM episodes WHERE session IN ({marks}) AND group_number IS NOT NULL", tuple(sessions)
    ).fetchall()
    # Turns refer to messages and to each other within their session: check references at the end.
    db.execute("PRAGMA defer_foreign_keys = ON")
    db.execute(f"DELETE FROM turns WHERE session IN ({marks})", tuple(sessions))
    db.execute(f"DELETE FROM messages WHERE session IN ({marks})", tuple(sessions))
    db.execute(
        "INSERT INTO unfinished_deletions (session)"
        f" SELECT DISTINCT id FROM sessions WHERE number IN ({marks}) ON CONFLICT DO NOTHING",
        tuple(sessions),
    )
    db.execute(f"DELETE FROM sessions WHERE number IN ({marks})", tuple(sessions))
    for row in attempts:
        groups.remove_attempt(db, row["group_number"])
    return numbers


def turns_in(db: sqlite3.Connection, sessions: Sequence[int]) -> list[int]:
    query = f"SELECT number FROM turns WHERE session IN ({', '.join('?' * len(sessions))})"
    return [row["number"] for row in db.execute(query, tuple(sessions))]


def unfinished(db: sqlite3.Connection) -> list[str]:
    """The ids of deleted sessions that may still be in files."""
    return [row["session"] for row in db.execute("SELECT session FROM unfinished_deletions ORDER BY number")]


def wipe(db: sqlite3.Connection, finished: Iterable[str] = (), *, beside_server: bool) -> str:
    """Remove what was deleted from the files too. If that cannot be done now: why, and what to do; else empty.

    SQLite overwrites the rows that it deletes, but not the copies that it left when it moved rows between pages.
    Then the deletion of the sessions `finished`, which are in no other file, is complete.
    """
    file = Path(db.execute("PRAGMA database_list").fetchone()["file"])
    if beside_server and file.stat().st_size > MAX_BYTES_REWRITTEN_BESIDE_SERVER:
        return f"rewriting so large a ledger would keep the server from recording: {WIPE_LATER} when it is stopped"
    db.execute("VACUUM")
    with transaction(db):
        db.executemany("DELETE FROM unfinished_deletions WHERE session = ?", [(session,) for session in finished])
    busy, _log, _checkpointed = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return f"another program is reading an older state of them: {WIPE_LATER} later" if busy else ""

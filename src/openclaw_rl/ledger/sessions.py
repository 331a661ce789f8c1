"""Sessions, their messages, and the states of their turns with the allowed transitions between them.

Requests are paths through a session's tree of messages: what requests have in common is stored once.
"""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, islice
from typing import Any

from openclaw_rl.ledger.errors import DamagedTurn, LedgerError, UnknownTurn
from openclaw_rl.ledger.packing import damage, known, pack_json, unpack_message
from openclaw_rl.rendering.known import Beginnings, remembered
from openclaw_rl.types import SessionKey, State, TurnKind

#: Explicit feedback brings a turn back to READY, also one that was given up for lack of a next state.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.CAPTURED: frozenset({State.AWAITING, State.READY, State.DROPPED}),
    State.AWAITING: frozenset({State.READY, State.DROPPED}),
    # A session whose turns were ready or judged can become an episode, whose reward they then await.
    State.READY: frozenset({State.AWAITING, State.JUDGED, State.DROPPED}),
    State.JUDGED: frozenset({State.AWAITING, State.BATCHED, State.READY, State.DROPPED}),
    State.BATCHED: frozenset({State.APPLIED, State.JUDGED, State.DROPPED}),
    # A step that was lost with the learner's memory is made again. In another epoch an imported turn is scored again.
    # The turns of steps that made the policy worse are set aside.
    State.APPLIED: frozenset({State.JUDGED, State.CAPTURED, State.DROPPED}),
    State.DROPPED: frozenset({State.READY}),
}
#: Reasons that are used in more than one place.
SUPERSEDED = "superseded: the client asked again"
NO_NEXT_STATE = "the session ended without a next state"
EPISODE_ENDED = "answered after the end of its episode"
#: Begins the reason of a turn whose training step was refused.
QUARANTINED = "quarantined: "
#: Begins the reason of a step that made the policy worse, and of its turns.
SET_ASIDE = "the guard: "
ALREADY_USED = (State.BATCHED, State.APPLIED)
#: How many messages of a request that continues a turn are looked for: a chat adds two, an agent's step some more.
FEW_AND_MANY = (4, 16)
#: How many messages one query looks for.
MAX_LOOKED_FOR = 500
#: How much memory the digests of messages may take.
MAX_PATHS_BYTES = 16_000_000


class IllegalTransition(LedgerError):
    """A turn cannot move from its state to the requested one."""

    def __init__(self, turn: int, current: State, wanted: State) -> None:
        super().__init__(f"turn {turn} is {current} and cannot become {wanted}")
        self.current, self.wanted = current, wanted


def move(db: sqlite3.Connection, turn: int, state: State, reason: str = "") -> None:
    """Change a turn's state. Raises IllegalTransition, UnknownTurn and DamagedTurn."""
    row = db.execute("SELECT state FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    with damage(turn):
        current = State(row["state"])
    if state not in TRANSITIONS[current]:
        raise IllegalTransition(turn, current, state)
    if current is State.BATCHED:
        # It can be claimed again, by whoever comes next.
        db.execute("DELETE FROM lease_turns WHERE turn = ?", (turn,))
    ready = time.time() if state is State.READY else None
    db.execute(
        "UPDATE turns SET state = ?, reason = ?, ready_at = coalesce(?, ready_at) WHERE number = ?",
        (state, reason, ready, turn),
    )


def drop_damaged(db: sqlite3.Connection, error: DamagedTurn) -> None:
    """Drop a turn that cannot be read, unless it was trained on or deleted."""
    row = db.execute("SELECT state FROM turns WHERE number = ?", (error.turn,)).fetchone()
    state = known(State, row["state"], None) if row is not None else State.DROPPED
    if state not in (State.APPLIED, State.DROPPED):
        db.execute("UPDATE turns SET state = ?, reason = ? WHERE number = ?", (State.DROPPED, error.reason, error.turn))
        db.execute("DELETE FROM lease_turns WHERE turn = ?", (error.turn,))


#: The source of sessions that are practised answers (`practices`).
PRACTISED = "practice"
#: The owner of sessions that came from a file.
IMPORTED = "imported"


def open_session(db: sqlite3.Connection, key: SessionKey, source: str, now: float) -> int:
    """The session's number. A closed session is opened again."""
    row = db.execute(
        "INSERT INTO sessions (owner, id, source, created, last) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (owner, id) DO UPDATE SET last = excluded.last, closed = NULL, settled = 0 RETURNING number",
        (*key, source, now, now),
    ).fetchone()
    return int(row[0])


def close_session(db: sqlite3.Connection, key: SessionKey) -> bool:
    """Close a session; its waiting turns are dropped, unless they await a reward. False if there is no such session."""
    row = db.execute("SELECT number FROM sessions WHERE owner = ? AND id = ?", key).fetchone()
    if row is None:
        return False
    _close(db, row["number"])
    return True


def close_idle_sessions(db: sqlite3.Connection, before: float) -> int:
    """Close the sessions whose last request was before a time; returns how many."""
    rows = db.execute("SELECT number FROM sessions WHERE closed IS NULL AND last < ?", (before,)).fetchall()
    for row in rows:
        _close(db, row["number"])
    return len(rows)


def _close(db: sqlite3.Connection, session: int) -> None:
    waiting = db.execute(
        "SELECT number FROM turns WHERE session = ? AND state = ? AND session NOT IN (SELECT session FROM episodes)",
        (session, State.AWAITING),
    )
    for row in waiting.fetchall():
        move(db, row["number"], State.DROPPED, NO_NEXT_STATE)
    db.execute("UPDATE sessions SET closed = ? WHERE number = ?", (time.time(), session))


def store_messages(
    db: sqlite3.Connection, session: int, messages: Sequence[Mapping[str, Any]], base: int | None
) -> int:
    """Follow the session's tree of messages, adding new ones; the number of the last message.

    A turn with a `base` has probably only few messages that are not stored: the others are not looked for.
    """
    paths = paths_of("", messages)
    if not paths:
        raise ValueError("a request without messages")
    first, stored = 0, dict[bytes, sqlite3.Row]()
    for first in (*(max(0, len(paths) - last) for last in FEW_AND_MANY), 0) if base is not None else (0,):
        stored = stored_messages(db, session, paths[first:])
        if paths[first] in stored:
            break
    parent: int | None = None
    for message, path in zip(messages[first:], paths[first:], strict=True):
        body, _digest = packed_message(message)
        row = stored.get(path)
        if row is None:
            row = db.execute(
                "INSERT INTO messages (session, parent, digest, body) VALUES (?, ?, ?, ?) RETURNING number",
                (session, parent, path, body),
            ).fetchone()
        elif row["body"] != body:
            # The stored message was damaged. The client has sent it again.
            db.execute("UPDATE messages SET body = ? WHERE number = ?", (body, row["number"]))
        parent = int(row[0])
    assert parent is not None
    return parent


def stored_messages(db: sqlite3.Connection, session: int, paths: Sequence[bytes]) -> dict[bytes, sqlite3.Row]:
    """Those of a session's messages that are at the end of these paths."""
    rows = list[sqlite3.Row]()
    for start in range(0, len(paths), MAX_LOOKED_FOR):
        some = paths[start : start + MAX_LOOKED_FOR]
        marks = ", ".join("?" * len(some))
        query = f"SELECT number, digest, body FROM messages WHERE session = ? AND digest IN ({marks})"
        rows += db.execute(query, (session, *some)).fetchall()
    return {row["digest"]: row for row in rows}


@remembered
def packed_message(message: Mapping[str, Any]) -> tuple[str, bytes]:
    """A message as it is stored, and a digest of that."""
    body = pack_json(message)
    return body, blake2b(body.encode(), digest_size=16).digest()


def path_digest(before: bytes, digest: bytes) -> bytes:
    """The digest of a message and all before it."""
    return blake2b(digest, key=before, digest_size=16).digest()


def longer_paths(paths: tuple[bytes, ...], messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
    digests = (packed_message(message)[1] for message in messages)
    new = accumulate(digests, path_digest, initial=paths[-1] if paths else b"")
    return *paths, *islice(new, 1, None)


#: The digests of the messages of a request, each with all before it.
paths_of = Beginnings[tuple[bytes, ...]](MAX_PATHS_BYTES, lambda _: (), longer_paths)


def load_messages(db: sqlite3.Connection, turn: int, last: int) -> list[dict[str, Any]]:
    """The messages of a turn's request, the first one first; `last` is the number of the last. Raises DamagedTurn."""
    # A message has a higher number than the one before it. Without this condition, a damaged number could be a circle.
    rows = db.execute(
        "WITH RECURSIVE line (number, parent, digest, body, depth) AS ("
        " SELECT number, parent, digest, body, 0 FROM messages WHERE number = ?"
        " UNION ALL SELECT m.number, m.parent, m.digest, m.body, line.depth + 1"
        " FROM messages m JOIN line ON m.number = line.parent AND m.number < line.number)"
        " SELECT parent, digest, body FROM line ORDER BY depth DESC",
        (last,),
    ).fetchall()
    with damage(turn):
        if not rows or rows[0]["parent"] is not None:
            raise ValueError("messages are missing")
        before = [b"", *(row["digest"] for row in rows[:-1])]
        return [read_message(row, path) for row, path in zip(rows, before, strict=True)]


def read_message(row: sqlite3.Row, before: bytes) -> dict[str, Any]:
    """The message in a row; `before` is the digest of the row before it. Raises ValueError if it has changed."""
    message = unpack_message(row["body"])
    if path_digest(before, blake2b(row["body"].encode(), digest_size=16).digest()) != row["digest"]:
        raise ValueError("a message has changed")
    return message


def session_ids(db: sqlite3.Connection, prefix: str) -> list[str]:
    """The ids of sessions that start with `prefix`, of all owners."""
    query = "SELECT DISTINCT id FROM sessions WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id"
    return [row["id"] for row in db.execute(query, (prefix,))]


def first_messages(db: sqlite3.Connection, session: int) -> list[dict[str, Any]]:
    """The messages of a session's first main turn, or of its first turn if it has none. Raises DamagedTurn."""
    row = db.execute(
        "SELECT number, request FROM turns WHERE session = ? ORDER BY kind = ? DESC, number LIMIT 1",
        (session, TurnKind.MAIN),
    ).fetchone()
    return [] if row is None else load_messages(db, row["number"], row["request"])

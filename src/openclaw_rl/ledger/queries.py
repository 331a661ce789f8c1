"""Queries about sessions, turns and messages."""

import json
import sqlite3
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.ledger import episodes, notes, verdicts
from openclaw_rl.ledger.changes import SUPERSEDED
from openclaw_rl.ledger.errors import UnknownTurn
from openclaw_rl.ledger.packing import unpack_flags, unpack_floats, unpack_ids, unpack_top
from openclaw_rl.types import (
    Counts,
    SessionKey,
    SessionSummary,
    State,
    StoredTurn,
    TurnKind,
)

SESSION = "JOIN sessions s ON s.number = t.session"


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The turn that a request continues."""

    number: int
    session: SessionKey
    depth: int
    """How many of the request's messages it covers, its own response included."""


@dataclass(frozen=True, slots=True)
class MainTurn:
    """A turn that can have a next state."""

    number: int
    has_next_state: bool


def find_ancestor(
    db: sqlite3.Connection,
    owner: str,
    ends: Sequence[tuple[int, bytes]],
    session: str | None,
    claimed: set[int],
) -> Ancestor | None:
    """The turn that covers most of a request: `ends` are (depth, end key), deepest first.

    Among equal conversations, one that has not been continued comes first, then the newest, so that two users who
    have said the same so far stay apart. Side turns and superseded turns come last: they have no next state either.
    """
    for depth, key in ends:
        rows = db.execute(
            "SELECT t.number, s.id, t.kind = ? AND t.reason != ? AS likely, t.next_state IS NULL AS fresh "
            f"FROM turns t {SESSION} WHERE t.end_key = ? AND s.owner = ? AND coalesce(?, s.id) = s.id "
            "ORDER BY likely DESC, fresh DESC, t.number DESC",
            (TurnKind.MAIN, SUPERSEDED, key, owner, session),
        ).fetchall()
        if rows:
            best = next(
                (row for row in rows if row["likely"] and row["fresh"] and row["number"] not in claimed), rows[0]
            )
            return Ancestor(best["number"], SessionKey(owner, best["id"]), depth)
    return None


def last_waiting(db: sqlite3.Connection, session: SessionKey, ancestor: int | None) -> int | None:
    """The newest turn of a session that waits for its next state; with `ancestor`, only turns that continue it."""
    row = db.execute(
        "WITH RECURSIVE line (waiting, number, parent) AS ("
        f" SELECT t.number, t.number, t.parent FROM turns t {SESSION} WHERE s.owner = ? AND s.id = ? AND t.state = ?"
        " AND t.next_state IS NULL"
        " UNION ALL SELECT line.waiting, t.number, t.parent FROM turns t JOIN line ON t.number = line.parent"
        " WHERE ? IS NOT NULL)"
        " SELECT max(waiting) AS number FROM line WHERE number = coalesce(?, waiting)",
        (*session, State.AWAITING, ancestor, ancestor),
    ).fetchone()
    return None if row["number"] is None else int(row["number"])


def main_turn(db: sqlite3.Connection, turn: int) -> MainTurn | None:
    """The turn itself if it is a main turn, else the nearest main turn among those it continues."""
    row = db.execute(
        "WITH RECURSIVE line (number, parent, kind, next_state, depth) AS ("
        " SELECT number, parent, kind, next_state, 0 FROM turns WHERE number = ?"
        " UNION ALL SELECT t.number, t.parent, t.kind, t.next_state, line.depth + 1"
        " FROM turns t JOIN line ON t.number = line.parent WHERE line.kind != ?)"
        " SELECT number, next_state IS NOT NULL AS answered FROM line WHERE kind = ? ORDER BY depth LIMIT 1",
        (turn, TurnKind.MAIN, TurnKind.MAIN),
    ).fetchone()
    return None if row is None else MainTurn(row["number"], bool(row["answered"]))


def sequence(db: sqlite3.Connection, turn: int) -> tuple[list[int], int]:
    """A turn's tokens, prompt and response in one list, and the length of the prompt. Raises UnknownTurn."""
    rows = db.execute(
        "WITH RECURSIVE line (number, base, keep, added, response, prompt_length, depth) AS ("
        " SELECT number, base, keep, added, response, prompt_length, 0 FROM turns WHERE number = ?"
        " UNION ALL SELECT t.number, t.base, t.keep, t.added, t.response, t.prompt_length, line.depth + 1"
        " FROM turns t JOIN line ON t.number = line.base)"
        " SELECT keep, added, response, prompt_length FROM line ORDER BY depth DESC",
        (turn,),
    ).fetchall()
    if not rows:
        raise UnknownTurn(f"there is no turn {turn}")
    tokens = b""
    for row in rows:
        tokens = tokens[: 4 * row["keep"]] + row["added"] + row["response"]
    return unpack_ids(tokens), rows[-1]["prompt_length"]


def response(db: sqlite3.Connection, turn: int) -> list[int]:
    """The tokens of a turn's response. Raises UnknownTurn."""
    return unpack_ids(_field(db, "response", turn))


def earlier_responses(db: sqlite3.Connection, turn: int) -> list[list[int]]:
    """The responses of the turns that a turn continues, the latest first."""
    rows = db.execute(
        "WITH RECURSIVE line (number, parent, response, depth) AS ("
        " SELECT number, parent, response, 0 FROM turns WHERE number = ?"
        " UNION ALL SELECT t.number, t.parent, t.response, line.depth + 1"
        " FROM turns t JOIN line ON t.number = line.parent)"
        " SELECT response FROM line WHERE depth > 0 ORDER BY depth",
        (turn,),
    )
    return [unpack_ids(row["response"]) for row in rows]


def request(db: sqlite3.Connection, turn: int) -> list[dict[str, Any]]:
    """The messages that a turn was given, tools first. Raises UnknownTurn."""
    return load_messages(db, _field(db, "request", turn))


def conversation(db: sqlite3.Connection, owner: str, completion: str) -> list[dict[str, Any]]:
    """The messages up to an owner's completion, its answer included (its first choice), without tools.

    Raises UnknownTurn.
    """
    row = db.execute(
        f"SELECT t.request, t.answer FROM turns t {SESSION} WHERE t.completion = ? AND t.choice = 0 AND s.owner = ?",
        (completion, owner),
    ).fetchone()
    if row is None:
        raise UnknownTurn(f"There is no completion {completion} of yours.")
    messages = [*load_messages(db, row["request"]), json.loads(row["answer"])]
    return [message for message in messages if message["role"] != "tools"]


def turns_of(db: sqlite3.Connection, owner: str, completion: str) -> list[int]:
    """The turns of an owner's completion, one for each choice. Raises UnknownTurn."""
    rows = db.execute(
        f"SELECT t.number FROM turns t {SESSION} WHERE t.completion = ? AND s.owner = ? ORDER BY t.choice",
        (completion, owner),
    ).fetchall()
    if not rows:
        raise UnknownTurn(f"There is no completion {completion} of yours.")
    return [row["number"] for row in rows]


def _field(db: sqlite3.Connection, name: str, turn: int) -> Any:
    row = db.execute(f"SELECT {name} FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    return row[name]


def load_turn(db: sqlite3.Connection, number: int) -> StoredTurn:
    """Everything about a turn."""
    row = db.execute(f"SELECT t.*, s.owner, s.id FROM turns t {SESSION} WHERE t.number = ?", (number,)).fetchone()
    tokens, prompt_length = sequence(db, number)
    verdict, sample = verdicts.load(db, number) or (None, None)
    return StoredTurn(
        number=number,
        session=SessionKey(row["owner"], row["id"]),
        completion=row["completion"],
        choice=row["choice"],
        kind=TurnKind(row["kind"]),
        kind_reason=row["kind_reason"],
        state=State(row["state"]),
        reason=row["reason"],
        created=row["created"],
        version=row["version"],
        continuation=row["continuation"],
        messages=load_messages(db, row["request"]),
        message=json.loads(row["answer"]),
        prompt_ids=tokens[:prompt_length],
        response_ids=tokens[prompt_length:],
        logprobs=unpack_floats(row["logprobs"]),
        top=unpack_top(row["top"]),
        sampling=json.loads(row["sampling"]),
        finish_reason=row["finish_reason"],
        next_state=json.loads(row["next_state"]) if row["next_state"] is not None else None,
        ready_at=row["ready_at"],
        feedback=verdicts.feedback_of(db, number),
        verdict=verdict,
        sample=sample,
        episode=episodes.of_turn(db, number, row["session"]),
        forced=unpack_flags(row["forced"], len(tokens) - prompt_length),
        notes=notes.of_conversation(db, number)[1],
        plain_ids=plain_prompt(db, number, tokens[:prompt_length]),
        details=json.loads(row["details"] or "{}"),
    )


def plain_prompt(db: sqlite3.Connection, turn: int, prompt: list[int]) -> list[int] | None:
    """A turn's prompt without notes; None if its prompt has none."""
    row = db.execute("SELECT * FROM plain_prompts WHERE turn = ?", (turn,)).fetchone()
    if row is None:
        return None
    return [*prompt[: row["start"]], *unpack_ids(row["added"]), *prompt[row["stop"] :]]


def plain_sequence(db: sqlite3.Connection, turn: int) -> list[int]:
    """A turn's tokens, prompt and response, as they are without notes in the prompt. Raises UnknownTurn."""
    tokens, prompt_length = sequence(db, turn)
    plain = plain_prompt(db, turn, tokens[:prompt_length])
    return tokens if plain is None else [*plain, *tokens[prompt_length:]]


def load_messages(db: sqlite3.Connection, last: int) -> list[dict[str, Any]]:
    """A request's messages, from its last one back to the first."""
    rows = db.execute(
        "WITH RECURSIVE line (parent, body, depth) AS ("
        " SELECT parent, body, 0 FROM messages WHERE number = ?"
        " UNION ALL SELECT m.parent, m.body, line.depth + 1 FROM messages m JOIN line ON m.number = line.parent)"
        " SELECT body FROM line ORDER BY depth DESC",
        (last,),
    )
    return [json.loads(row["body"]) for row in rows]


def ready_turns(db: sqlite3.Connection, besides: Collection[int], limit: int) -> list[int]:
    """Turns that can be judged, the longest ready first, except those in `besides`."""
    rows = db.execute(
        "SELECT number FROM turns WHERE state = ? ORDER BY ready_at, number LIMIT ?",
        (State.READY, limit + len(besides)),
    )
    return [row["number"] for row in rows if row["number"] not in besides][:limit]


def first_unscored(db: sqlite3.Connection) -> int | None:
    """The first imported turn that the policy has not scored yet."""
    row = db.execute("SELECT min(number) AS number FROM turns WHERE state = ?", (State.CAPTURED,)).fetchone()
    return None if row["number"] is None else int(row["number"])


def open_conversations(db: sqlite3.Connection, limit: int) -> list[tuple[int, str]]:
    """The last main turns of the open sessions that were active last, with their owners; the newest first."""
    latest = "SELECT number, owner FROM sessions WHERE closed IS NULL ORDER BY last DESC LIMIT ?"
    rows = db.execute(
        f"SELECT max(t.number) AS number, s.owner FROM ({latest}) s JOIN turns t ON t.session = s.number "
        "WHERE t.kind = ? GROUP BY s.number ORDER BY 1 DESC",
        (limit, TurnKind.MAIN),
    )
    return [(row["number"], row["owner"]) for row in rows]


def judged_turns(db: sqlite3.Connection) -> list[int]:
    """Turns that have a verdict and are no part of an episode, in the order they were recorded."""
    rows = db.execute(
        "SELECT v.turn FROM verdicts v JOIN turns t ON t.number = v.turn "
        "WHERE t.session NOT IN (SELECT session FROM episodes) ORDER BY v.turn"
    )
    return [row["turn"] for row in rows]


def turn_numbers(db: sqlite3.Connection, session: SessionKey | None = None) -> list[int]:
    """The turns of a session, or of all, in the order they were recorded."""
    where, values = ("WHERE s.owner = ? AND s.id = ?", tuple(session)) if session else ("", ())
    rows = db.execute(f"SELECT t.number FROM turns t {SESSION} {where} ORDER BY t.number", values)
    return [row["number"] for row in rows]


def conversation_starts(db: sqlite3.Connection, limit: int) -> list[int]:
    """The first main turns that continue no other turn."""
    query = "SELECT number FROM turns WHERE kind = ? AND parent IS NULL ORDER BY number LIMIT ?"
    return [row["number"] for row in db.execute(query, (TurnKind.MAIN, limit))]


def sessions(
    db: sqlite3.Connection,
    id: str | None = None,
    owner: str | None = None,
    *,
    episodes_only: bool = False,
    limit: int = -1,
) -> list[SessionSummary]:
    """Sessions, the latest active first; of one id or one owner if given; at most `limit`, if it is not negative."""
    only = "AND s.number IN (SELECT session FROM episodes)" if episodes_only else ""
    rows = db.execute(
        "SELECT s.*, count(t.number) AS turns, coalesce(sum(t.kind = 'main'), 0) AS main, "
        "coalesce(sum(t.next_state IS NOT NULL), 0) AS ready FROM sessions s "
        "LEFT JOIN turns t ON t.session = s.number "
        f"WHERE coalesce(?, s.id) = s.id AND coalesce(?, s.owner) = s.owner {only} "
        "GROUP BY s.number ORDER BY s.last DESC LIMIT ?",
        (id, owner, limit),
    )
    return [
        SessionSummary(
            SessionKey(row["owner"], row["id"]),
            row["number"],
            row["source"],
            row["created"],
            row["last"],
            row["closed"] is not None,
            row["turns"],
            row["main"],
            row["ready"],
            episodes.of_session(db, row["number"]),
        )
        for row in rows
    ]


def session_ids(db: sqlite3.Connection, prefix: str) -> list[str]:
    """The ids of sessions that start with `prefix`, of all owners."""
    query = "SELECT DISTINCT id FROM sessions WHERE substr(id, 1, length(?1)) = ?1 ORDER BY id"
    return [row["id"] for row in db.execute(query, (prefix,))]


def first_messages(db: sqlite3.Connection, session: int) -> list[dict[str, Any]]:
    """The messages of a session's first main turn, or of its first turn if it has no main turn."""
    row = db.execute(
        "SELECT request FROM turns WHERE session = ? ORDER BY kind = ? DESC, number LIMIT 1", (session, TurnKind.MAIN)
    ).fetchone()
    return [] if row is None else load_messages(db, row["request"])


def counts(db: sqlite3.Connection) -> Counts:
    states = Counter({State(row[0]): row[1] for row in db.execute("SELECT state, count(*) FROM turns GROUP BY state")})
    dropped = db.execute(
        "SELECT reason, count(*) FROM turns WHERE state = ? GROUP BY reason ORDER BY 2 DESC", (State.DROPPED,)
    )
    step, version = db.execute(
        "SELECT coalesce(max(step), 0), coalesce(max(version), 0) FROM updates WHERE outcome = 'applied'"
    ).fetchone()
    return Counts({state: states[state] for state in State}, {row[0]: row[1] for row in dropped}, step, version)

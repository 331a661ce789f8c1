"""The changes that can be made to a ledger, each a function of a connection inside a transaction."""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import blake2b
from typing import Any

from openclaw_rl.ledger.errors import CannotJudge, UnknownTurn
from openclaw_rl.ledger.packing import common_prefix, pack_flags, pack_floats, pack_ids, pack_json, pack_top
from openclaw_rl.ledger.states import TRANSITIONS, IllegalTransition
from openclaw_rl.types import EpisodeState, Feedback, Scores, SessionKey, State, Turn, TurnKind

#: The owner of sessions that came from a file.
IMPORTED = "imported"
#: Reasons that are used in more than one place.
SUPERSEDED = "superseded: the client asked again"
NO_NEXT_STATE = "the session ended without a next state"
EPISODE_ENDED = "answered after the end of its episode"
#: Begins the reason of a turn whose training step was refused.
QUARANTINED = "quarantined: "
ALREADY_USED = (State.BATCHED, State.APPLIED)


def open_session(db: sqlite3.Connection, key: SessionKey, source: str, now: float) -> int:
    """The session's number. A closed session is opened again."""
    row = db.execute(
        "INSERT INTO sessions (owner, id, source, created, last) VALUES (?, ?, ?, ?, ?) "
        "ON CONFLICT (owner, id) DO UPDATE SET last = excluded.last, closed = NULL, settled = 0 RETURNING number",
        (*key, source, now, now),
    ).fetchone()
    return int(row[0])


def store_messages(
    db: sqlite3.Connection, session: int, messages: Sequence[Mapping[str, Any]], base: int | None = None
) -> int:
    """Follow the session's tree of messages, adding new ones; the number of the last message.

    Turn `base` has probably the same messages at the beginning. They are read at once instead of one by one.
    """
    bodies = [pack_json(message) for message in messages]
    digests = [blake2b(body.encode(), digest_size=16).digest() for body in bodies]
    path = [] if base is None else stored_path(db, session, base)
    shared = common_prefix(digests, [digest for _number, digest in path])
    parent: int | None = path[shared - 1][0] if shared else None
    for body, digest in zip(bodies[shared:], digests[shared:], strict=True):
        row = db.execute(
            "SELECT number FROM messages WHERE session = ? AND coalesce(parent, 0) = ? AND digest = ?",
            (session, parent or 0, digest),
        ).fetchone()
        if row is None:
            row = db.execute(
                "INSERT INTO messages (session, parent, digest, body) VALUES (?, ?, ?, ?) RETURNING number",
                (session, parent, digest, body),
            ).fetchone()
        parent = int(row[0])
    if parent is None:
        raise ValueError("a request without messages")
    return parent


def stored_path(db: sqlite3.Connection, session: int, turn: int) -> list[tuple[int, bytes]]:
    """The messages of a turn's request, as numbers and digests; empty if it is a turn of another session."""
    rows = db.execute(
        "WITH RECURSIVE line (number, parent, digest, depth) AS ("
        " SELECT m.number, m.parent, m.digest, 0 FROM turns t JOIN messages m ON m.number = t.request"
        " WHERE t.number = ? AND t.session = ?"
        " UNION ALL SELECT m.number, m.parent, m.digest, line.depth + 1"
        " FROM messages m JOIN line ON m.number = line.parent)"
        " SELECT number, digest FROM line ORDER BY depth DESC",
        (turn, session),
    )
    return [(row["number"], row["digest"]) for row in rows]


def record_turn(
    db: sqlite3.Connection, turn: Turn, source: str, base: int | None, keep: int, state: State, reason: str = ""
) -> int:
    """Store a turn whose prompt begins with the first `keep` tokens of turn `base`; the turn's number."""
    now = time.time()
    session = open_session(db, turn.session, source, now)
    values = {
        "session": session,
        "completion": turn.completion,
        "choice": turn.choice,
        "kind": turn.kind,
        "kind_reason": turn.kind_reason,
        "state": state,
        "reason": reason,
        "created": now if turn.created is None else turn.created,
        "version": turn.version,
        "continuation": turn.continuation,
        "parent": turn.parent,
        "request": store_messages(db, session, turn.messages, base),
        "answer": pack_json(turn.message),
        "base": base,
        "keep": keep,
        "added": pack_ids(turn.prompt_ids[keep:]),
        "prompt_length": len(turn.prompt_ids),
        "response": pack_ids(turn.response_ids),
        "logprobs": pack_floats(turn.logprobs),
        "top": pack_top(turn.top),
        "forced": pack_flags(turn.forced),
        "notes_from": turn.notes_from,
        "sampling": json.dumps({**asdict(turn.sampling), "stop_token_ids": sorted(turn.sampling.stop_token_ids)}),
        "finish_reason": turn.finish_reason,
        "request_key": turn.request_key,
        "end_key": turn.end_key,
        "details": pack_json(turn.details) if turn.details else None,
    }
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
    row = db.execute(f"INSERT INTO turns ({names}) VALUES ({marks}) RETURNING number", values).fetchone()
    record_notes(db, int(row[0]), turn)
    return int(row[0])


def record_notes(db: sqlite3.Connection, number: int, turn: Turn) -> None:
    """Store the notes of a conversation that begins with a turn, and the turn's prompt without notes."""
    if turn.notes:
        db.execute("UPDATE turns SET notes_from = number WHERE number = ?", (number,))
        db.executemany(
            "INSERT INTO turn_notes (turn, place, note, text, given) VALUES (?, ?, ?, ?, ?)",
            [(number, place, note.number, note.text, note.given) for place, note in enumerate(turn.notes)],
        )
    if turn.plain_ids is not None:
        prompt, plain = list(turn.prompt_ids), list(turn.plain_ids)
        start = common_prefix(prompt, plain)
        end = min(common_prefix(prompt[::-1], plain[::-1]), len(prompt) - start, len(plain) - start)
        db.execute(
            "INSERT INTO plain_prompts (turn, start, stop, added) VALUES (?, ?, ?, ?)",
            (number, start, len(prompt) - end, pack_ids(plain[start : len(plain) - end])),
        )


def capture(db: sqlite3.Connection, turns: Sequence[Turn], source: str, base: int | None, keep: int) -> list[int]:
    """Store the turns of one answered request. Earlier attempts at the same request are superseded."""
    first = turns[0]
    if first.kind is TurnKind.MAIN:
        supersede(db, first.session, first.request_key)
    if base is not None and db.execute("SELECT 1 FROM turns WHERE number = ?", (base,)).fetchone() is None:
        # The base turn was forgotten while this request was answered: store the whole prompt.
        base, keep = None, 0
        turns = [replace(turn, parent=None) for turn in turns]
    late = EPISODE_ENDED if episode_state(db, first.session) not in (None, EpisodeState.HELD) else ""
    numbers = []
    for turn in turns:
        reason = late if turn.kind is TurnKind.MAIN else turn.kind_reason
        state = State.DROPPED if reason else State.AWAITING
        numbers.append(record_turn(db, turn, source, base, keep, state, reason))
    return numbers


def episode_state(db: sqlite3.Connection, session: SessionKey) -> EpisodeState | None:
    """The state of a session's episode; None if the session is no episode."""
    row = db.execute(
        "SELECT e.state FROM episodes e JOIN sessions s ON s.number = e.session WHERE s.owner = ? AND s.id = ?", session
    ).fetchone()
    return row and EpisodeState(row["state"])


def supersede(db: sqlite3.Connection, session: SessionKey, request_key: bytes) -> None:
    """Drop the turns of this session that answered the same request and still wait for a next state."""
    rows = db.execute(
        "SELECT t.number FROM turns t JOIN sessions s ON s.number = t.session "
        "WHERE t.request_key = ? AND s.owner = ? AND s.id = ? AND t.state = ? AND t.next_state IS NULL",
        (request_key, *session, State.AWAITING),
    ).fetchall()
    for row in rows:
        move(db, row["number"], State.DROPPED, SUPERSEDED)


def move(db: sqlite3.Connection, turn: int, state: State, reason: str = "") -> None:
    """Change a turn's state. Raises IllegalTransition and UnknownTurn."""
    row = db.execute("SELECT state FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    current = State(row["state"])
    if state not in TRANSITIONS[current]:
        raise IllegalTransition(turn, current, state)
    ready = time.time() if state is State.READY else None
    db.execute(
        "UPDATE turns SET state = ?, reason = ?, ready_at = coalesce(?, ready_at) WHERE number = ?",
        (state, reason, ready, turn),
    )


def set_next_state(db: sqlite3.Connection, turn: int, messages: Sequence[Mapping[str, Any]]) -> None:
    """Record the messages that followed a turn. The first ones count; a later branch of the session changes nothing.

    The turn can then be judged, unless it is part of an episode: that is what the reward is for.
    """
    row = db.execute(
        "SELECT state, next_state, kind, (SELECT 1 FROM episodes e WHERE e.session = t.session) AS episode "
        "FROM turns t WHERE number = ?",
        (turn,),
    ).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    if row["next_state"] is not None or row["kind"] != TurnKind.MAIN:
        return
    db.execute("UPDATE turns SET next_state = ? WHERE number = ?", (pack_json(messages), turn))
    if row["state"] in (State.AWAITING, State.DROPPED) and not row["episode"]:
        move(db, turn, State.READY)


def set_logprobs(
    db: sqlite3.Connection, turn: int, version: int, scores: Scores, *, keep_verdict: bool = False
) -> None:
    """Score an imported turn: from now on it counts as sampled by that policy version. Its next state is known.

    With `keep_verdict`, a turn that has a verdict from an earlier epoch need not be judged again.
    """
    move(db, turn, State.READY)
    if keep_verdict and db.execute("SELECT 1 FROM verdicts WHERE turn = ?", (turn,)).fetchone():
        move(db, turn, State.JUDGED)
    db.execute(
        "UPDATE turns SET version = ?, logprobs = ?, top = ? WHERE number = ?",
        (version, pack_floats(scores.logprobs), pack_top(scores.top), turn),
    )


def add_feedback(db: sqlite3.Connection, owner: str, completion: str, choice: int, feedback: Feedback) -> None:
    """Attach feedback; the turn can then be judged, or judged again. Raises UnknownTurn and CannotJudge."""
    row = db.execute(
        "SELECT t.number, t.session, t.state, t.kind, t.kind_reason, t.reason, "
        "(SELECT 1 FROM episodes e WHERE e.session = t.session) AS episode FROM turns t "
        "JOIN sessions s ON s.number = t.session WHERE t.completion = ? AND t.choice = ? AND s.owner = ?",
        (completion, choice, owner),
    ).fetchone()
    if row is None:
        raise UnknownTurn(f"There is no completion {completion} (choice {choice}) of yours.")
    if row["kind"] != TurnKind.MAIN:
        raise CannotJudge(f"This turn is not trained on: {row['kind_reason']}.")
    if row["episode"]:
        raise CannotJudge(
            "This turn is part of an episode, which is rewarded as a whole: POST /v1/sessions/{id}/reward."
        )
    state = State(row["state"])
    if state in ALREADY_USED:
        raise CannotJudge("This turn has already been trained on.")
    db.execute(
        "INSERT INTO feedback (turn, score, text, source, created) VALUES (?, ?, ?, ?, ?)",
        (row["number"], feedback.score, feedback.text, feedback.source, time.time()),
    )
    # If its session has ended, it must be settled once more.
    db.execute("UPDATE sessions SET settled = 0 WHERE number = ?", (row["session"],))
    if state is not State.READY and state is not State.CAPTURED:
        move(db, row["number"], State.READY)


def close_session(db: sqlite3.Connection, key: SessionKey) -> bool:
    """Close a session; its waiting turns are dropped, unless they await a reward. False if there is no such session."""
    row = db.execute("SELECT number FROM sessions WHERE owner = ? AND id = ?", key).fetchone()
    if row is None:
        return False
    _close(db, row["number"])
    return True


def close_idle(db: sqlite3.Connection, before: float) -> int:
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

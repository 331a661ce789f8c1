"""Turns: how they are recorded, continued and read."""

import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from openclaw_rl.ledger import episodes, examples, notes, verdicts
from openclaw_rl.ledger.errors import CannotJudge, DamagedTurn, UnknownTurn
from openclaw_rl.ledger.packing import (
    damage,
    known,
    pack_flags,
    pack_floats,
    pack_ids,
    pack_json,
    pack_top,
    prompt_without_notes,
    sequence,
    unpack_flags,
    unpack_floats,
    unpack_message,
    unpack_messages,
    unpack_object,
    unpack_top,
    whole_text,
)
from openclaw_rl.ledger.sessions import (
    ALREADY_USED,
    EPISODE_ENDED,
    SUPERSEDED,
    close_session,
    load_messages,
    move,
    open_session,
    store_messages,
)
from openclaw_rl.types import (
    SHARED,
    Counts,
    EpisodeMode,
    EpisodeState,
    Feedback,
    SamplingParams,
    Scores,
    SessionKey,
    Source,
    State,
    StoredTurn,
    Turn,
    TurnKind,
)

SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams))
SESSION = "JOIN sessions s ON s.number = t.session"
TURN_COLUMNS = (
    *("session", "completion", "choice", "kind", "kind_reason", "state", "reason", "created", "version"),
    *("continuation", "parent", "request", "answer", "base", "keep", "added", "prompt_length", "response"),
    *("logprobs", "top", "forced", "notes_from", "sampling", "finish_reason", "request_key", "end_key", "details"),
)
INSERT_TURN = (
    f"INSERT INTO turns ({', '.join(TURN_COLUMNS)}) VALUES ({', '.join('?' * len(TURN_COLUMNS))}) RETURNING number"
)
#: A turn that waits, or was given up for lack of a next state, can be judged once it has one, unless it is part of an
#: episode: that is what the reward is for.
BECOMES_READY = (
    f"state IN ('{State.AWAITING}', '{State.DROPPED}')"
    " AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.session = turns.session)"
)
SET_NEXT_STATE = (
    "UPDATE turns SET next_state = ?2, next_at = ?3,"
    f" state = CASE WHEN {BECOMES_READY} THEN '{State.READY}' ELSE state END,"
    f" reason = CASE WHEN {BECOMES_READY} THEN '' ELSE reason END,"
    f" ready_at = CASE WHEN {BECOMES_READY} THEN ?3 ELSE ready_at END"
    f" WHERE number = ?1 AND next_state IS NULL AND kind = '{TurnKind.MAIN}'"
)


@dataclass(frozen=True, slots=True)
class MainTurn:
    """A turn that can have a next state."""

    number: int
    has_next_state: bool


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The turn that a request continues."""

    number: int
    session: SessionKey
    depth: int
    """How many of the request's messages it covers, its own response included."""
    main: MainTurn | None
    """The turn itself; None if it is a side turn."""


def capture(
    db: sqlite3.Connection,
    turns: Sequence[Turn],
    source: str,
    base: int | None,
    keep: int,
    *,
    done: bool = False,
    episode: EpisodeMode | None = None,
) -> list[int]:
    """Store the turns of one answered request; their numbers. Earlier attempts at the same request are superseded.

    With `done`, their session ends; with `episode`, it is one.
    """
    first = turns[0]
    if episode is not None:
        episodes.begin(db, first.session, source, episode)
    known = db.execute(
        "SELECT (SELECT number FROM turns WHERE number = ?) AS base, e.state AS episode,"
        " (SELECT group_concat(t.number) FROM turns t WHERE t.request_key = ? AND t.session = s.number AND t.state = ?"
        " AND t.next_state IS NULL) AS same FROM (SELECT 1) LEFT JOIN sessions s ON s.owner = ? AND s.id = ?"
        " LEFT JOIN episodes e ON e.session = s.number",
        (base, first.request_key, State.AWAITING, *first.session),
    ).fetchone()
    if first.kind is TurnKind.MAIN and known["same"]:
        for number in str(known["same"]).split(","):
            move(db, int(number), State.DROPPED, SUPERSEDED)
    if base is not None and known["base"] is None:
        # The base turn was forgotten while this request was answered: store the whole prompt.
        base, keep = None, 0
        turns = [replace(turn, parent=None) for turn in turns]
    late = EPISODE_ENDED if known["episode"] not in (None, EpisodeState.HELD) else ""
    numbers = []
    for turn in turns:
        reason = late if turn.kind is TurnKind.MAIN else turn.kind_reason
        state = State.DROPPED if reason else State.AWAITING
        numbers.append(record_turn(db, turn, source, base, keep, state, reason))
    if done:
        close_session(db, first.session)
    return numbers


def episode_state(db: sqlite3.Connection, session: SessionKey) -> EpisodeState | None:
    """The state of a session's episode; None if the session is no episode."""
    row = db.execute(
        "SELECT e.state FROM episodes e JOIN sessions s ON s.number = e.session WHERE s.owner = ? AND s.id = ?", session
    ).fetchone()
    return row and EpisodeState(row["state"])


def record_turn(
    db: sqlite3.Connection, turn: Turn, source: str, base: int | None, keep: int, state: State, reason: str = ""
) -> int:
    """Store a turn whose prompt begins with the first `keep` tokens of turn `base`; the turn's number."""
    now = time.time()
    session = open_session(db, turn.session, source, now)
    values = (
        session,
        turn.completion,
        turn.choice,
        turn.kind,
        turn.kind_reason,
        state,
        reason,
        now if turn.created is None else turn.created,
        turn.version,
        turn.continuation,
        turn.parent,
        store_messages(db, session, turn.messages, base),
        pack_json(turn.message),
        base,
        keep,
        pack_ids(turn.prompt_ids[keep:]),
        len(turn.prompt_ids),
        pack_ids(turn.response_ids),
        pack_floats(turn.logprobs),
        pack_top(turn.top),
        pack_flags(turn.forced),
        turn.notes_from,
        packed_sampling(turn.sampling),
        turn.finish_reason,
        turn.request_key,
        turn.end_key,
        pack_json(turn.details) if turn.details else None,
    )
    (number,) = db.execute(INSERT_TURN, values).fetchone()
    notes.record(db, number, turn)
    return int(number)


def packed_sampling(params: SamplingParams) -> str:
    values = {name: getattr(params, name) for name in SAMPLING_FIELDS}
    return pack_json({**values, "stop_token_ids": sorted(params.stop_token_ids)})


def set_next_state(db: sqlite3.Connection, turn: int, messages: Sequence[Mapping[str, Any]]) -> None:
    """Record the messages that followed a turn. The first ones count; a later branch of the session changes nothing."""
    changed = db.execute(SET_NEXT_STATE, (turn, pack_json(messages), time.time())).rowcount
    if not changed and db.execute("SELECT 1 FROM turns WHERE number = ?", (turn,)).fetchone() is None:
        raise UnknownTurn(f"there is no turn {turn}")


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


def add_feedback(db: sqlite3.Connection, owner: str, completion: str, choice: int, feedback: Feedback) -> bool:
    """Attach feedback; the turn can then be judged, or judged again. Raises UnknownTurn, CannotJudge, DamagedTurn.

    A correction is kept as an example in the same transaction, also if the turn has been trained on. Returns whether
    there is one now: where tools are used, or if the question is too long, there is none.
    """
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
    with damage(row["number"]):
        state = State(row["state"])
    if state in ALREADY_USED and not feedback.correction:
        raise CannotJudge("This turn has already been trained on.")
    if feedback.correction and examples.is_answer(db, row["number"], feedback.correction):
        feedback = replace(feedback, score=1.0)
    db.execute(
        "INSERT INTO feedback (turn, score, text, source, created, correction) VALUES (?, ?, ?, ?, ?, ?)",
        (row["number"], feedback.score, feedback.text, feedback.source, time.time(), whole_text(feedback.correction)),
    )
    is_example = bool(feedback.correction) and examples.keep_correction(db, row["number"], feedback.correction)
    if state in ALREADY_USED:
        return is_example
    # If its session has ended, it must be settled once more.
    db.execute("UPDATE sessions SET settled = 0 WHERE number = ?", (row["session"],))
    if state is not State.READY and state is not State.CAPTURED:
        move(db, row["number"], State.READY)
    return is_example


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
            "SELECT t.number, s.id, t.kind = ? AS is_main, t.reason != ? AS likely, t.next_state IS NULL AS fresh "
            f"FROM turns t {SESSION} WHERE t.end_key = ? AND s.owner = ? AND coalesce(?, s.id) = s.id "
            "ORDER BY is_main AND likely DESC, fresh DESC, t.number DESC",
            (TurnKind.MAIN, SUPERSEDED, key, owner, session),
        ).fetchall()
        if rows:
            free = (row for row in rows if row["is_main"] and row["likely"] and row["fresh"])
            best = next((row for row in free if row["number"] not in claimed), rows[0])
            main = MainTurn(best["number"], not best["fresh"]) if best["is_main"] else None
            return Ancestor(best["number"], SessionKey(owner, best["id"]), depth, main)
    return None


def last_waiting(db: sqlite3.Connection, session: SessionKey, ancestor: int | None = None) -> int | None:
    """The newest turn of a session that waits for its next state; with `ancestor`, only turns that continue it."""
    row = db.execute(
        "WITH RECURSIVE line (waiting, number, parent) AS ("
        f" SELECT t.number, t.number, t.parent FROM turns t {SESSION} WHERE s.owner = ? AND s.id = ? AND t.state = ?"
        " AND t.next_state IS NULL"
        " UNION ALL SELECT line.waiting, t.number, t.parent FROM turns t JOIN line ON t.number = line.parent"
        " AND t.number < line.number WHERE ? IS NOT NULL)"
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
        " FROM turns t JOIN line ON t.number = line.parent AND t.number < line.number WHERE line.kind != ?)"
        " SELECT number, next_state IS NOT NULL AS answered FROM line WHERE kind = ? ORDER BY depth LIMIT 1",
        (turn, TurnKind.MAIN, TurnKind.MAIN),
    ).fetchone()
    return None if row is None else MainTurn(row["number"], bool(row["answered"]))


def turns_of(db: sqlite3.Connection, owner: str, completion: str) -> list[int]:
    """The turns of an owner's completion, one for each choice. Raises UnknownTurn."""
    rows = db.execute(
        f"SELECT t.number FROM turns t {SESSION} WHERE t.completion = ? AND s.owner = ? ORDER BY t.choice",
        (completion, owner),
    ).fetchall()
    if not rows:
        raise UnknownTurn(f"There is no completion {completion} of yours.")
    return [row["number"] for row in rows]


def find_turn(db: sqlite3.Connection, owner: str, completion: str) -> StoredTurn:
    """The turn of an owner's completion (its first choice). Raises UnknownTurn."""
    return load_turn(db, turns_of(db, owner, completion)[0])


def load_turns(db: sqlite3.Connection, session: SessionKey | None = None) -> Iterator[StoredTurn | DamagedTurn]:
    """The turns of a session, or of all, one at a time in the order they were recorded.

    For one that cannot be read there is the error that says so.
    """
    for number in turn_numbers(db, session):
        try:
            yield load_turn(db, number)
        except DamagedTurn as error:
            yield error


def load_turn(db: sqlite3.Connection, number: int) -> StoredTurn:
    """Everything about a turn. Raises UnknownTurn and DamagedTurn."""
    line = "(SELECT p.line FROM policies p WHERE p.version = t.version) AS line"
    query = f"SELECT t.*, s.owner, s.id, {line} FROM turns t {SESSION} WHERE t.number = ?"
    row = db.execute(query, (number,)).fetchone()
    tokens, prompt_length = sequence(db, number)
    with damage(number):
        turn = _unpack(db, row, tokens, prompt_length)
        if len(turn.logprobs) not in (0, len(turn.response_ids)):
            raise ValueError("log-probs are missing")
    return turn


def load_readable(db: sqlite3.Connection, number: int) -> StoredTurn | None:
    """The same; None for a damaged turn, where a page can do without it. Raises UnknownTurn."""
    try:
        return load_turn(db, number)
    except DamagedTurn:
        return None


def _unpack(db: sqlite3.Connection, row: sqlite3.Row, tokens: list[int], prompt_length: int) -> StoredTurn:
    number = row["number"]
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
        created=float(row["created"]),
        version=int(row["version"]),
        continuation=row["continuation"],
        messages=load_messages(db, number, row["request"]),
        message=unpack_message(row["answer"]),
        prompt_ids=tokens[:prompt_length],
        response_ids=tokens[prompt_length:],
        logprobs=unpack_floats(row["logprobs"]),
        top=unpack_top(row["top"]),
        sampling=unpack_object(row["sampling"]),
        finish_reason=row["finish_reason"],
        next_state=unpack_messages(row["next_state"]),
        ready_at=row["ready_at"],
        feedback=verdicts.feedback_of(db, number),
        verdict=verdict,
        sample=sample,
        line=row["line"] or SHARED,
        episode=episodes.of_turn(db, number, row["session"]),
        forced=unpack_flags(row["forced"], len(tokens) - prompt_length),
        notes=notes.of_conversation(db, number)[1],
        plain_ids=prompt_without_notes(db, number, tokens[:prompt_length]),
        details=unpack_object(row["details"]),
        next_at=row["next_at"],
    )


def request(db: sqlite3.Connection, turn: int) -> list[dict[str, Any]]:
    """The messages that a turn was given, tools first. Raises UnknownTurn."""
    row = db.execute("SELECT request FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    return load_messages(db, turn, row["request"])


def conversation(db: sqlite3.Connection, owner: str, completion: str) -> list[dict[str, Any]]:
    """The messages up to an owner's completion, its answer included (its first choice), without tools.

    Raises UnknownTurn.
    """
    row = db.execute(
        f"SELECT t.number, t.request, t.answer FROM turns t {SESSION} "
        "WHERE t.completion = ? AND t.choice = 0 AND s.owner = ?",
        (completion, owner),
    ).fetchone()
    if row is None:
        raise UnknownTurn(f"There is no completion {completion} of yours.")
    with damage(row["number"]):
        messages = [*load_messages(db, row["number"], row["request"]), unpack_message(row["answer"])]
    return [message for message in messages if message["role"] != "tools"]


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


def judged_turns(db: sqlite3.Connection) -> list[int]:
    """Turns that somebody judged and that are no part of an episode, in the order they were recorded."""
    rows = db.execute(
        "SELECT v.turn FROM verdicts v JOIN turns t ON t.number = v.turn "
        "WHERE t.session NOT IN (SELECT session FROM episodes) AND v.source IS NOT ? ORDER BY v.turn",
        (Source.PRACTICE,),
    )
    return [row["turn"] for row in rows]


def turn_numbers(db: sqlite3.Connection, session: SessionKey | None = None) -> list[int]:
    """The turns of a session, or of all, in the order they were recorded."""
    where, values = ("WHERE s.owner = ? AND s.id = ?", tuple(session)) if session else ("", ())
    rows = db.execute(f"SELECT t.number FROM turns t {SESSION} {where} ORDER BY t.number", values)
    return [row["number"] for row in rows]


def conversation_starts(db: sqlite3.Connection, limit: int, owner: str | None = None) -> list[int]:
    """The first main turns that continue no other turn, of all owners or of one."""
    query = (
        "SELECT number FROM turns WHERE kind = ?1 AND parent IS NULL AND (?2 IS NULL OR session IN "
        "(SELECT number FROM sessions WHERE owner = ?2)) ORDER BY number LIMIT ?3"
    )
    return [row["number"] for row in db.execute(query, (TurnKind.MAIN, owner, limit))]


def open_conversations(db: sqlite3.Connection, limit: int, owner: str | None = None) -> list[tuple[int, str]]:
    """The last main turns of the open sessions that were active last, with their owners; the newest first."""
    latest = (
        "SELECT number, owner FROM sessions WHERE closed IS NULL AND coalesce(?, owner) = owner "
        "ORDER BY last DESC LIMIT ?"
    )
    rows = db.execute(
        f"SELECT max(t.number) AS number, s.owner FROM ({latest}) s JOIN turns t ON t.session = s.number "
        "WHERE t.kind = ? GROUP BY s.number ORDER BY 1 DESC",
        (owner, limit, TurnKind.MAIN),
    )
    return [(row["number"], row["owner"]) for row in rows]


def counts(db: sqlite3.Connection) -> Counts:
    """How many turns are in each state, without practised answers."""
    rows = db.execute("SELECT state, count(*) FROM turns GROUP BY state")
    states = Counter({known(State, row[0], None): row[1] for row in rows})
    for row in db.execute("SELECT t.state FROM practised p JOIN turns t ON t.number = p.turn"):
        states[known(State, row[0], None)] -= 1
    dropped = db.execute(
        "SELECT reason, count(*) FROM turns WHERE state = ? AND number NOT IN (SELECT turn FROM practised) "
        "GROUP BY reason ORDER BY 2 DESC",
        (State.DROPPED,),
    )
    step, version = db.execute(
        "SELECT coalesce(max(step), 0), coalesce(max(version), 0) FROM updates WHERE outcome = 'applied' AND line = ?",
        (SHARED,),
    ).fetchone()
    return Counts({state: states[state] for state in State}, {row[0]: row[1] for row in dropped}, step, version)

"""What commands and pages list of a ledger, and what changed since they last read it.

What pages show is read by index, a bounded piece at a time, whatever the size of the ledger.

Triggers (in `schema`) log each session, turn, verdict, update and practice that a transaction adds, changes or removes.
SQLite lets one transaction write at a time, so the rows of the log are numbered in the order of their commits. The log
keeps its newest rows only.
"""

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.ledger import episodes, notes, verdicts
from openclaw_rl.ledger.errors import DamagedTurn
from openclaw_rl.ledger.packing import damage, known, unpack_message, unpack_messages, whole_text
from openclaw_rl.ledger.sessions import PRACTISED, read_message
from openclaw_rl.ledger.training import metrics_of
from openclaw_rl.ledger.turns import SESSION
from openclaw_rl.types import (
    SHARED,
    EpisodePoint,
    EpisodeState,
    GroupCard,
    PageChanges,
    PagePlace,
    PractisedFrom,
    SampleKind,
    SessionCard,
    SessionKey,
    SessionSummary,
    Sign,
    State,
    StepOutcome,
    TurnCard,
    TurnKind,
    UpdateBatch,
    UpdateCard,
)

#: Numbers with so many digits may be larger than a column can hold.
MAX_DIGITS = 19
#: How many of a session's last verdicts a list shows.
MAX_SIGNS = 14
#: How much of a session's first message a list shows, in characters.
MAX_QUESTION_CHARACTERS = 300
#: The most messages between two answers that are shown; a request without an answer in it shows its last ones.
MAX_NEW_MESSAGES = 40
#: More changes at once are reported as "read everything again".
MAX_LISTED_CHANGES = 400
#: Turns of a step whose words are shown; a batch of groups can have thousands.
MAX_BATCH_CARDS = 40
#: The beginning of a message's text, without reading a large body into this process. As bytes: half a surrogate pair,
#: which JSON can contain, is no UTF-8.
TEXT_START = (
    "CASE WHEN json_valid(m.body) THEN CAST(substr(CASE json_type(m.body, '$.content') "
    "WHEN 'text' THEN json_extract(m.body, '$.content') WHEN 'array' THEN json_extract(m.body, '$.content[0].text') "
    f"END, 1, {MAX_QUESTION_CHARACTERS}) AS BLOB) END"
)
#: Practised answers are no conversations: the pages of their steps and notes show them.
HIDDEN = f" AND s.source != '{PRACTISED}'"
ONLY = {
    "": "",
    "chats": "AND NOT EXISTS (SELECT 1 FROM episodes e WHERE e.session = s.number)",
    "episodes": "AND EXISTS (SELECT 1 FROM episodes e WHERE e.session = s.number)",
}
#: Without the columns that hold tokens.
CARD = (
    "SELECT t.number, t.session, t.completion, t.choice, t.kind, t.kind_reason, t.state, t.reason, "
    "t.created, t.version, length(t.response) / 4 AS tokens, t.request, t.answer, t.next_state, "
    f"(SELECT max(u.number) FROM update_turns u WHERE u.turn = t.number) AS used_by FROM turns t {SESSION}"
)
UPDATE = "SELECT u.*, (SELECT count(*) FROM update_turns t WHERE t.number = u.number) AS turns FROM updates u"


def row_number(text: str) -> int | None:
    """The number of a row, as addresses and forms write it; None if no row can have it."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None


def session_summaries(
    db: sqlite3.Connection,
    id: str | None = None,
    owner: str | None = None,
    *,
    episodes_only: bool = False,
    limit: int = -1,
) -> list[SessionSummary]:
    """Sessions, the latest active first; of one id or one owner if given; at most `limit`, if it is not negative.

    Practised answers are only listed by their id.
    """
    only = "AND s.number IN (SELECT session FROM episodes)" if episodes_only else ""
    only += HIDDEN if id is None else ""
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


def session_page(
    db: sqlite3.Connection, owner: str, after: PagePlace | None, limit: int, only: str = ""
) -> list[SessionCard]:
    """An owner's sessions, the latest active first, after a place; `only` is a key of `ONLY`."""
    where, values = ("AND (s.last, s.number) < (?, ?)", tuple(after)) if after else ("", ())
    rows = db.execute(
        f"SELECT * FROM sessions s WHERE s.owner = ? {where} {HIDDEN} {ONLY[only]} "
        "ORDER BY s.last DESC, s.number DESC LIMIT ?",
        (owner, *values, limit),
    ).fetchall()
    return [session_card(db, row) for row in rows]


def find_session(db: sqlite3.Connection, owner: str, number: int) -> SessionCard | None:
    """An owner's session; None if there is none with this number."""
    row = db.execute("SELECT * FROM sessions s WHERE s.owner = ? AND s.number = ?", (owner, number)).fetchone()
    return None if row is None else session_card(db, row)


def named_session(db: sqlite3.Connection, owner: str, id: str) -> SessionCard | None:
    """An owner's session; None if there is none with this id."""
    row = db.execute("SELECT * FROM sessions s WHERE s.owner = ? AND s.id = ?", (owner, id)).fetchone()
    return None if row is None else session_card(db, row)


def session_card(db: sqlite3.Connection, row: sqlite3.Row) -> SessionCard:
    """The card of a row of `sessions`."""
    number = row["number"]
    (turns,) = db.execute("SELECT count(*) FROM turns WHERE session = ?", (number,)).fetchone()
    first = db.execute(
        f"SELECT {TEXT_START} AS text FROM messages m WHERE m.number = "
        "(SELECT request FROM turns WHERE session = ? ORDER BY number LIMIT 1)",
        (number,),
    ).fetchone()
    last = db.execute(
        "SELECT t.version, v.turn, v.score FROM turns t LEFT JOIN verdicts v ON v.turn = t.number "
        "WHERE t.session = ? ORDER BY t.number DESC LIMIT ?",
        (number, MAX_SIGNS),
    ).fetchall()
    return SessionCard(
        number=number,
        key=SessionKey(row["owner"], row["id"]),
        created=row["created"],
        last=row["last"],
        closed=row["closed"] is not None,
        turns=turns,
        question=readable(first["text"]) if first else "",
        version=last[0]["version"] if last else 0,
        signs=tuple(None if turn["turn"] is None else sign_of(turn["score"]) for turn in reversed(last)),
        episode=episodes.of_session(db, number),
    )


def readable(text: bytes | None) -> str:
    """The text of these bytes; halves of surrogate pairs are replaced."""
    try:
        return whole_text((text or b"").decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return (text or b"").decode("utf-8", "replace")


def sign_of(score: float | None) -> Sign:
    if score is None:
        return Sign.ABSTAINED
    return Sign.GOOD if score > 0 else Sign.BAD if score < 0 else Sign.NEUTRAL


def turn_page(db: sqlite3.Connection, session: int, before: int | None, limit: int) -> list[TurnCard]:
    """The last turns of a session before a turn, in the order they were recorded."""
    rows = db.execute(
        f"{CARD} WHERE t.session = ? AND t.number < ? ORDER BY t.number DESC LIMIT ?",
        (session, before if before is not None else 1 << 62, limit),
    ).fetchall()
    return [turn_card(db, row) for row in reversed(rows)]


def find_turns(db: sqlite3.Connection, owner: str, numbers: Sequence[int]) -> list[TurnCard]:
    """Those of these turns that are the owner's."""
    marks = ", ".join("?" * len(numbers))
    rows = db.execute(
        f"{CARD} WHERE t.number IN ({marks}) AND s.owner = ? ORDER BY t.number", (*numbers, owner)
    ).fetchall()
    return [turn_card(db, row) for row in rows]


def turn_card(db: sqlite3.Connection, row: sqlite3.Row) -> TurnCard:
    """The card of a turn. That of a damaged turn has the reason and no words."""
    try:
        with damage(row["number"]):
            said = _said(db, row)
    except DamagedTurn as error:
        said = {
            "kind": known(TurnKind, row["kind"], TurnKind.MAIN),
            "state": known(State, row["state"], State.DROPPED),
            "reason": error.reason,
            "asked": (),
            "message": {"role": "assistant", "content": ""},
            "came_next": (),
            "feedback": (),
            "verdict": None,
            "sample": None,
        }
    return TurnCard(
        number=row["number"],
        session=row["session"],
        completion=row["completion"],
        choice=row["choice"],
        kind_reason=row["kind_reason"],
        created=row["created"],
        version=row["version"],
        tokens=row["tokens"],
        update=row["used_by"],
        **said,
    )


def _said(db: sqlite3.Connection, row: sqlite3.Row) -> dict[str, Any]:
    """What a card has that must be unpacked."""
    number = row["number"]
    verdict, sample = verdicts.load(db, number) or (None, None)
    return {
        "kind": TurnKind(row["kind"]),
        "state": State(row["state"]),
        "reason": row["reason"],
        "asked": tuple(new_messages(db, row["request"])),
        "message": unpack_message(row["answer"]),
        "came_next": tuple(unpack_messages(row["next_state"]) or ()),
        "feedback": tuple(verdicts.feedback_of(db, number)),
        "verdict": verdict,
        "sample": sample,
        "episode": episodes.of_turn(db, number, row["session"]),
        "notes": tuple(notes.of_conversation(db, number)[1]),
        "practised": _practised_from(db, number) if sample is SampleKind.PRACTICE else None,
    }


def _practised_from(db: sqlite3.Connection, turn: int) -> PractisedFrom | None:
    row = db.execute(
        "SELECT c.note, t.number AS turn, t.session FROM practised p JOIN practices c ON c.number = p.practice "
        "LEFT JOIN turns t ON t.number = p.asked WHERE p.turn = ?",
        (turn,),
    ).fetchone()
    return row and PractisedFrom(row["note"], row["turn"], row["session"])


def new_messages(db: sqlite3.Connection, last: int) -> list[dict[str, Any]]:
    """A request's messages after the last answer in it, without tools."""
    messages: list[dict[str, Any]] = []
    number: int | None = last
    while number is not None and len(messages) < MAX_NEW_MESSAGES:
        row = db.execute(
            "SELECT m.parent, m.digest, m.body, coalesce(p.digest, x'') AS before FROM messages m "
            "LEFT JOIN messages p ON p.number = m.parent WHERE m.number = ?",
            (number,),
        ).fetchone()
        message = read_message(row, row["before"])
        if message.get("role") == "assistant":
            break
        if message.get("role") != "tools":
            messages.append(message)
        number = row["parent"]
    return messages[::-1]


def update_page(db: sqlite3.Connection, before: int | None, limit: int, line: str | None = None) -> list[UpdateCard]:
    """Training steps before one, of all lines or of one, the newest first."""
    rows = db.execute(
        f"{UPDATE} WHERE u.number < ? AND coalesce(?, u.line) = u.line ORDER BY u.number DESC LIMIT ?",
        (before if before is not None else 1 << 62, line, limit),
    )
    return [_update(row) for row in rows]


def find_update(db: sqlite3.Connection, number: int) -> UpdateCard | None:
    row = db.execute(f"{UPDATE} WHERE u.number = ?", (number,)).fetchone()
    return None if row is None else _update(row)


def _update(row: sqlite3.Row) -> UpdateCard:
    return UpdateCard(
        row["number"],
        row["step"],
        row["version"],
        known(StepOutcome, row["outcome"], StepOutcome.UNDONE),
        row["reason"],
        row["created"],
        row["turns"],
        metrics_of(row),
        row["line"],
    )


def update_batch(db: sqlite3.Connection, update: UpdateCard, owner: str) -> UpdateBatch:
    """The turns of a step: the words of the owner's own, and how many others there are."""
    rows = db.execute(
        "SELECT u.turn, s.owner FROM update_turns u LEFT JOIN turns t ON t.number = u.turn "
        "LEFT JOIN sessions s ON s.number = t.session WHERE u.number = ? ORDER BY u.turn",
        (update.number,),
    ).fetchall()
    own = [row["turn"] for row in rows if row["owner"] == owner]
    parent = db.execute("SELECT parent FROM policies WHERE version = ?", (update.version,)).fetchone()
    return UpdateBatch(
        tuple(find_turns(db, owner, own[:MAX_BATCH_CARDS])),
        others=sum(row["owner"] not in (None, owner) for row in rows),
        deleted=sum(row["owner"] is None for row in rows),
        parent=parent and int(parent["parent"]),
    )


def step_metrics(db: sqlite3.Connection, limit: int, line: str = SHARED) -> list[Mapping[str, Any]]:
    """The metrics of the last steps of a line that count, the oldest first, each with its step and version."""
    rows = db.execute(
        "SELECT step, version, metrics FROM updates WHERE outcome = ? AND line = ? ORDER BY number DESC LIMIT ?",
        (StepOutcome.APPLIED, line, limit),
    ).fetchall()
    return [{**metrics_of(row), "step": row["step"], "version": row["version"]} for row in reversed(rows)]


def group_page(db: sqlite3.Connection, owner: str, before: int | None, limit: int) -> list[GroupCard]:
    """An owner's groups before one, the newest first, with their attempts."""
    rows = db.execute(
        "SELECT * FROM groups WHERE owner = ? AND number < ? ORDER BY number DESC LIMIT ?",
        (owner, before if before is not None else 1 << 62, limit),
    ).fetchall()
    return [_group(db, row) for row in rows]


def _group(db: sqlite3.Connection, row: sqlite3.Row) -> GroupCard:
    attempts = db.execute(
        "SELECT s.* FROM episodes e JOIN sessions s ON s.number = e.session WHERE e.group_number = ? ORDER BY s.number",
        (row["number"],),
    ).fetchall()
    return GroupCard(
        row["number"],
        row["name"],
        row["size"],
        closed=row["closed"] is not None,
        settled=row["settled"] is not None,
        mean=row["mean"],
        is_constant=bool(row["constant"]),
        attempts=tuple(session_card(db, attempt) for attempt in attempts),
    )


def episode_points(db: sqlite3.Connection, owner: str | None, limit: int) -> list[EpisodePoint]:
    """The rewards of an owner's last episodes, or of all, the oldest first."""
    rows = db.execute(
        "SELECT e.session, e.reward, e.solved FROM episodes e JOIN sessions s ON s.number = e.session "
        "WHERE e.state = ? AND s.owner = coalesce(?, s.owner) ORDER BY e.session DESC LIMIT ?",
        (EpisodeState.REWARDED, owner, limit),
    ).fetchall()
    return [
        EpisodePoint(row["session"], row["reward"], None if row["solved"] is None else bool(row["solved"]))
        for row in reversed(rows)
    ]


@dataclass(frozen=True, slots=True)
class Changes:
    """What changed after a cursor: numbers of rows, each once, in ascending order.

    Sessions and turns that were forgotten are among them; they can no longer be read.
    """

    cursor: int
    """Ask for the changes since this one next."""
    complete: bool
    """False: the log no longer reaches back to the given cursor. Read everything, then continue from `cursor`."""
    sessions: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    verdicts: tuple[int, ...] = ()
    """Turns that were judged."""
    updates: tuple[int, ...] = ()
    practices: tuple[int, ...] = ()


def cursor(db: sqlite3.Connection) -> int:
    """The number of the newest change: where `changes_since` starts for a caller that has read everything."""
    (newest,) = db.execute("SELECT max(number) FROM changes").fetchone()
    return int(newest)


def changes_since(db: sqlite3.Connection, since: int) -> Changes:
    """What changed after a cursor, and the next cursor. Cursor 0 is before every ledger: it means "read all".

    A caller that passes the cursor that it was last given learns of every committed change exactly once, from every
    process, also after restarts. If the log no longer reaches back so far, the answer says so.
    """
    (oldest,) = db.execute("SELECT min(number) FROM changes").fetchone()
    newest = cursor(db)
    # A cursor beyond the newest change belongs to another ledger: one that stood here before.
    if not oldest <= since <= newest:
        return Changes(newest, complete=False)
    rows = db.execute(
        "SELECT DISTINCT kind, item FROM changes WHERE number > ? AND number <= ? ORDER BY item", (since, newest)
    ).fetchall()

    def items(kind: str) -> tuple[int, ...]:
        return tuple(row["item"] for row in rows if row["kind"] == kind)

    return Changes(newest, True, items("session"), items("turn"), items("verdict"), items("update"), items("practice"))


def changes_for(db: sqlite3.Connection, since: int, owner: str) -> PageChanges:
    """What changed after a cursor, as far as the owner may know."""
    changes = changes_since(db, since)
    turns = sorted({*changes.turns, *changes.verdicts})
    if not changes.complete or len(turns) + len(changes.sessions) > MAX_LISTED_CHANGES:
        return PageChanges(changes.cursor, complete=False)
    turn_rows = _existing(db, f"SELECT t.number, t.session, s.owner FROM turns t {SESSION} WHERE t.number", turns)
    rows = _existing(db, "SELECT number, number AS session, owner FROM sessions WHERE number", changes.sessions)
    practices = _existing(db, "SELECT number, owner FROM practices WHERE number", changes.practices)
    sessions = {row["session"] for row in (*turn_rows, *rows) if row["owner"] == owner}
    return PageChanges(
        changes.cursor,
        sessions=tuple(sorted(sessions)),
        turns=tuple(row["number"] for row in turn_rows if row["owner"] == owner),
        updates=changes.updates,
        practices=tuple(row["number"] for row in practices if row["owner"] == owner),
        deleted=len(turn_rows) < len(turns) or len(rows) < len(changes.sessions),
    )


def _existing(db: sqlite3.Connection, query: str, numbers: Iterable[int]) -> list[sqlite3.Row]:
    given = tuple(numbers)
    return db.execute(f"{query} IN ({', '.join('?' * len(given))}) ORDER BY 1", given).fetchall() if given else []

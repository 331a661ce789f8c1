"""Training steps: which turns a step takes, what became of it, and how the ledger is reconciled with a checkpoint.

A turn is in at most one step that counts. A step counts (`applied`), was lost when the learner crashed or restarted
(`undone`: its turns can be trained on again), was rolled back (`rolled_back`) or was refused (`quarantined`).
"""

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.ledger.changes import QUARANTINED, move
from openclaw_rl.types import Batch, State, StepOutcome, Update

#: The step that produced a policy version, or the last step before it.
STEP_OF = (
    "coalesce((SELECT u.step FROM updates u WHERE u.version <= {} AND u.outcome IN ('applied', 'undone') "
    "ORDER BY u.version DESC LIMIT 1), 0)"
)


def waiting(db: sqlite3.Connection) -> int:
    """How many turns can be trained on."""
    (count,) = db.execute("SELECT count(*) FROM turns WHERE state = ?", (State.JUDGED,)).fetchone()
    return int(count)


def claim(db: sqlite3.Connection, count: int, step: int, max_staleness: int) -> list[int]:
    """Take the next turns for the step after `step`, the longest judged first. Turns of too old a policy are dropped.

    A policy's age is counted in steps and not in versions: a step that was lost and repeated makes a new version, but
    the turns are no staler for it.
    """
    stale = db.execute(
        f"SELECT number FROM turns WHERE state = ? AND {STEP_OF.format('turns.version')} < ? - ?",
        (State.JUDGED, step, max_staleness),
    ).fetchall()
    for row in stale:
        move(db, row["number"], State.DROPPED, f"stale: answered more than {max_staleness} policy versions ago")
    rows = db.execute(
        "SELECT t.number FROM turns t JOIN verdicts v ON v.turn = t.number WHERE t.state = ? ORDER BY v.number LIMIT ?",
        (State.JUDGED, count),
    ).fetchall()
    for row in rows:
        move(db, row["number"], State.BATCHED)
    return [row["number"] for row in rows]


def release(db: sqlite3.Connection) -> None:
    """Return the turns of a step that did not happen to those that can be trained on."""
    for row in db.execute("SELECT number FROM turns WHERE state = ?", (State.BATCHED,)).fetchall():
        move(db, row["number"], State.JUDGED)


def apply(
    db: sqlite3.Connection, step: int, version: int, turns: Sequence[int], metrics: Mapping[str, Any] | None = None
) -> None:
    """Record a step: its turns were trained on, and it made this policy version."""
    _record(db, step, version, StepOutcome.APPLIED, turns, metrics=metrics)
    for turn in turns:
        move(db, turn, State.APPLIED)


def quarantine(db: sqlite3.Connection, step: int, turns: Sequence[int], reason: str) -> None:
    """Record a step that was refused: its turns are set aside with the reason."""
    _record(db, step, None, StepOutcome.QUARANTINED, turns, reason)
    for turn in turns:
        move(db, turn, State.DROPPED, f"{QUARANTINED}{reason}")


def reconcile(db: sqlite3.Connection, step: int, batches: Sequence[Batch], version: int | None = None) -> list[int]:
    """Make the ledger agree with a checkpoint made at `step`, which remembers its last batches; the steps undone.

    Steps in the checkpoint count, whether or not the ledger knew of them; later steps are undone. With the checkpoint's
    `version`, earlier versions of later steps were rolled back and stay so.
    """
    release(db)
    if version is not None:
        roll_back(db, step, version)
    undone = db.execute(
        "SELECT number, step FROM updates WHERE outcome = ? AND (step > ? OR version > ?) ORDER BY step",
        (StepOutcome.APPLIED, step, version),
    ).fetchall()
    for row in undone:
        for (turn,) in _turns_in(db, row["number"], State.APPLIED):
            move(db, turn, State.JUDGED)
        db.execute("UPDATE updates SET outcome = ? WHERE number = ?", (StepOutcome.UNDONE, row["number"]))
    known = {row["step"] for row in db.execute("SELECT step FROM updates WHERE outcome = ?", (StepOutcome.APPLIED,))}
    for batch in batches:
        if batch.step <= step and batch.step not in known:
            _apply_again(db, batch)
    return [row["step"] for row in undone]


def roll_back(db: sqlite3.Connection, step: int, before: int | None = None) -> None:
    """Go back to a step: later steps no longer count, and their turns are not trained on again."""
    db.execute(
        "UPDATE updates SET outcome = ? WHERE outcome = ? AND step > ? AND version < coalesce(?, version + 1)",
        (StepOutcome.ROLLED_BACK, StepOutcome.APPLIED, step, before),
    )


def latest_version(db: sqlite3.Connection) -> int:
    """The highest policy version in the ledger: a number is never used for two policies."""
    (version,) = db.execute(
        "SELECT max(coalesce((SELECT max(version) FROM updates), 0), coalesce((SELECT max(version) FROM turns), 0))"
    ).fetchone()
    return int(version)


def latest_step(db: sqlite3.Connection) -> int:
    """The last step that counts."""
    (step,) = db.execute(
        "SELECT coalesce(max(step), 0) FROM updates WHERE outcome = ?", (StepOutcome.APPLIED,)
    ).fetchone()
    return int(step)


def load(db: sqlite3.Connection, outcome: StepOutcome | None = None) -> list[Update]:
    """Training steps in the order they were made; those with one outcome if it is given."""
    rows = db.execute(
        "SELECT * FROM updates WHERE coalesce(?, outcome) = outcome ORDER BY number", (outcome,)
    ).fetchall()
    return [
        Update(
            row["number"],
            row["step"],
            row["version"],
            StepOutcome(row["outcome"]),
            tuple(turn for (turn,) in _turns_in(db, row["number"])),
            row["reason"],
            json.loads(row["metrics"]),
            row["created"],
        )
        for row in rows
    ]


def _record(
    db: sqlite3.Connection,
    step: int,
    version: int | None,
    outcome: StepOutcome,
    turns: Sequence[int],
    reason: str = "",
    metrics: Mapping[str, Any] | None = None,
) -> None:
    row = db.execute(
        "INSERT INTO updates (step, version, outcome, reason, metrics, created) VALUES (?, ?, ?, ?, ?, ?) "
        "RETURNING number",
        (step, version, outcome, reason, json.dumps(metrics or {}), time.time()),
    ).fetchone()
    db.executemany("INSERT INTO update_turns (number, turn) VALUES (?, ?)", [(row["number"], turn) for turn in turns])


def _apply_again(db: sqlite3.Connection, batch: Batch) -> None:
    """Record a step that only its checkpoint knows; turns that were forgotten since stay forgotten."""
    marks = ", ".join("?" * len(batch.turns))
    states = db.execute(f"SELECT number, state FROM turns WHERE number IN ({marks})", batch.turns).fetchall()
    taken = [row for row in states if row["state"] in (State.READY, State.JUDGED, State.BATCHED)]
    for row in taken:
        if row["state"] == State.READY:
            move(db, row["number"], State.JUDGED)
        if row["state"] != State.BATCHED:
            move(db, row["number"], State.BATCHED)
    turns = [row["number"] for row in taken]
    apply(db, batch.step, batch.version, turns)


def _turns_in(db: sqlite3.Connection, number: int, state: State | None = None) -> list[tuple[int]]:
    rows = db.execute(
        "SELECT u.turn FROM update_turns u LEFT JOIN turns t ON t.number = u.turn "
        "WHERE u.number = ? AND coalesce(?, t.state, '') = coalesce(t.state, '') ORDER BY u.turn",
        (number, state),
    )
    return [(row["turn"],) for row in rows]

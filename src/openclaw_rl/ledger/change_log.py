"""The log of changes in a ledger, from which a reader learns what is new without reading everything again.

Triggers (in `migrations`) add a row for each session, turn, verdict and update that a transaction adds, changes or
removes. SQLite lets one transaction write at a time, so the rows are numbered in the order of their commits. The log
keeps its newest rows only.
"""

import sqlite3
from dataclasses import dataclass


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


def cursor(db: sqlite3.Connection) -> int:
    """The number of the newest change."""
    (newest,) = db.execute("SELECT max(number) FROM changes").fetchone()
    return int(newest)


def changes_since(db: sqlite3.Connection, since: int) -> Changes:
    (oldest,) = db.execute("SELECT min(number) FROM changes").fetchone()
    newest = cursor(db)
    # A cursor beyond the newest change belongs to another ledger: one that stood here before.
    if not oldest <= since <= newest:
        return Changes(newest, complete=False)
    rows = db.execute("SELECT DISTINCT kind, item FROM changes WHERE number > ? ORDER BY item", (since,)).fetchall()

    def items(kind: str) -> tuple[int, ...]:
        return tuple(row["item"] for row in rows if row["kind"] == kind)

    return Changes(newest, True, items("session"), items("turn"), items("verdict"), items("update"))

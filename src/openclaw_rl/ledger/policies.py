"""Policy versions: which policy each was made from, and so which turns are in it.

A step makes a new version from the one before it. A version that serves the weights of another one again, after a
rollback, is made from that one without a step.
"""

import json
import sqlite3
from collections.abc import Iterable

from openclaw_rl.types import BASE_VERSION


def add(db: sqlite3.Connection, version: int, parent: int, label: str = "") -> None:
    """Record a policy before it serves or is saved. A number that another policy has raises sqlite3.IntegrityError.

    `label` is what the inference servers call its weights, if an outside trainer made them.
    """
    db.execute("INSERT INTO policies (version, parent, label) VALUES (?, ?, ?)", (version, parent, label))


def label(db: sqlite3.Connection, version: int) -> str:
    """What the inference servers call a policy's weights; empty if they are not an outside trainer's."""
    row = db.execute("SELECT label FROM policies WHERE version = ?", (version,)).fetchone()
    return str(row["label"]) if row else ""


def is_known(db: sqlite3.Connection, version: int) -> bool:
    return db.execute("SELECT 1 FROM policies WHERE version = ?", (version,)).fetchone() is not None


def line(db: sqlite3.Connection, version: int) -> list[int]:
    """A version and those that it was made from, the newest first, without the base model."""
    rows = db.execute(
        "WITH RECURSIVE line (version) AS (SELECT ?1 UNION"
        " SELECT p.parent FROM policies p JOIN line ON p.version = line.version)"
        " SELECT version FROM line WHERE version != ?2 ORDER BY version DESC",
        (version, BASE_VERSION),
    )
    return [row["version"] for row in rows]


def turns_deleted(db: sqlite3.Connection) -> list[int]:
    """The turns that steps were made from and that were deleted since."""
    rows = db.execute("SELECT DISTINCT turn FROM update_turns WHERE turn NOT IN (SELECT number FROM turns)")
    return [row["turn"] for row in rows]


def steps_with(db: sqlite3.Connection, turns: Iterable[int]) -> list[int]:
    """The training steps that used these turns and made a policy, whether or not they count."""
    rows = db.execute(
        "SELECT DISTINCT s.step FROM updates s JOIN update_turns u ON u.number = s.number "
        "WHERE u.turn IN (SELECT value FROM json_each(?)) AND s.version IS NOT NULL ORDER BY s.step",
        (json.dumps(list(turns)),),
    )
    return [row["step"] for row in rows]


def trained_on(db: sqlite3.Connection, turns: Iterable[int]) -> set[int]:
    """The versions that contain at least one of these turns."""
    rows = db.execute(
        "WITH RECURSIVE trained (version) AS ("
        " SELECT s.version FROM updates s JOIN update_turns u ON u.number = s.number"
        " WHERE u.turn IN (SELECT value FROM json_each(?)) AND s.version IS NOT NULL"
        " UNION SELECT p.version FROM policies p JOIN trained ON p.parent = trained.version)"
        " SELECT version FROM trained",
        (json.dumps(list(turns)),),
    )
    return {row["version"] for row in rows}

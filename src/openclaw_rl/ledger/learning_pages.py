"""What pages show of training steps, groups and episodes. Each query reads a bounded piece by index."""

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from openclaw_rl.ledger import pages
from openclaw_rl.types import EpisodePoint, EpisodeState, GroupCard, StepOutcome, UpdateBatch, UpdateCard

#: Turns of a step whose words are shown; a batch of groups can have thousands.
MAX_BATCH_CARDS = 40


def update_page(db: sqlite3.Connection, before: int | None, limit: int) -> list[UpdateCard]:
    """Training steps before one, the newest first."""
    rows = db.execute(
        f"{UPDATE} WHERE u.number < ? ORDER BY u.number DESC LIMIT ?",
        (before if before is not None else 1 << 62, limit),
    )
    return [_update(row) for row in rows]


UPDATE = "SELECT u.*, (SELECT count(*) FROM update_turns t WHERE t.number = u.number) AS turns FROM updates u"


def _update(row: sqlite3.Row) -> UpdateCard:
    return UpdateCard(
        row["number"],
        row["step"],
        row["version"],
        StepOutcome(row["outcome"]),
        row["reason"],
        row["created"],
        row["turns"],
        json.loads(row["metrics"]),
    )


def find_update(db: sqlite3.Connection, number: int) -> UpdateCard | None:
    row = db.execute(f"{UPDATE} WHERE u.number = ?", (number,)).fetchone()
    return None if row is None else _update(row)


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
        tuple(pages.find_turns(db, owner, own[:MAX_BATCH_CARDS])),
        others=sum(row["owner"] not in (None, owner) for row in rows),
        deleted=sum(row["owner"] is None for row in rows),
        parent=parent and int(parent["parent"]),
    )


def step_metrics(db: sqlite3.Connection, limit: int) -> list[Mapping[str, Any]]:
    """The metrics of the last steps that count, the oldest first, each with its step and version."""
    rows = db.execute(
        "SELECT step, version, metrics FROM updates WHERE outcome = ? ORDER BY number DESC LIMIT ?",
        (StepOutcome.APPLIED, limit),
    ).fetchall()
    return [{**json.loads(row["metrics"]), "step": row["step"], "version": row["version"]} for row in reversed(rows)]


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
        attempts=tuple(pages.session_card(db, attempt) for attempt in attempts),
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

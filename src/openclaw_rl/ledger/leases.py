"""Leases: the judged turns that an outside trainer has claimed, and that it has to confirm in time.

The turns of an open lease are `batched`, so nobody else gets them; one that is dropped leaves its lease. A confirmed
lease is a training step that counts. The turns of a lease that ends in another way are `judged` again.

- A turn is in one open lease at most. A group is leased as a whole, once it is settled.
- A lease that was confirmed is a step that counts, exactly once, however often it is confirmed.
- A lease that runs out gives its turns back. It cannot be confirmed any more.
- Leases are on the disk: they hold across a crash of either side.
"""

import secrets
import sqlite3
import time

from openclaw_rl.ledger import training
from openclaw_rl.ledger.errors import LeaseRefused, UnknownLease
from openclaw_rl.ledger.packing import known
from openclaw_rl.ledger.sessions import move
from openclaw_rl.types import Lease, LeaseEnd, State, StepOutcome

EXPIRED = "SELECT number FROM leases WHERE ended = '' AND expires <= ?"


def claim(db: sqlite3.Connection, count: int, max_staleness: int, seconds: float) -> Lease | None:
    """Lease at least `count` turns, single ones and whole groups; None if there are not as many.

    Leases that have run out end first. Turns of too old a policy are dropped.
    """
    expire(db)
    turns = training.claim(db, count, last_step(db), max_staleness)
    if len(turns) < count:
        for turn in turns:
            move(db, turn, State.JUDGED)
        return None
    now = time.time()
    lease = Lease(secrets.token_hex(16), tuple(turns), now, now + seconds)
    row = db.execute(
        "INSERT INTO leases (id, created, expires) VALUES (?, ?, ?) RETURNING number",
        (lease.id, lease.created, lease.expires),
    ).fetchone()
    db.executemany("INSERT INTO lease_turns (lease, turn) VALUES (?, ?)", [(row["number"], turn) for turn in turns])
    return lease


def confirm(db: sqlite3.Connection, id: str, version: int, parent: int) -> int:
    """Record that a lease's turns were trained on; the number of the step.

    The step made policy `version` from `parent`. To confirm a lease again changes nothing. Turns that were deleted
    meanwhile stay in the record of the step. Raises UnknownLease, and LeaseRefused for a lease that has ended.
    """
    row = db.execute("SELECT * FROM leases WHERE id = ?", (id,)).fetchone()
    if row is None:
        raise UnknownLease(f"There is no lease {id!r}.")
    if row["ended"] == LeaseEnd.CONFIRMED:
        return int(row["step"])
    if row["ended"] == LeaseEnd.TAKEN_BACK:
        raise LeaseRefused("This lease was taken back, and its turns can be claimed again.")
    late = time.time() - row["expires"]
    if row["ended"] or late >= 0:
        raise LeaseRefused(
            f"This lease ran out {late:.0f} s ago, so its turns went back and are handed out again: "
            "claim with a longer lease_seconds."
        )
    turns = _turns_of(db, row["number"])
    if not training.is_known_policy(db, version):
        training.add_policy(db, version, parent)
    step = last_step(db) + 1
    training.record_step(db, step, version, StepOutcome.APPLIED, list(turns))
    for turn, state in turns.items():
        if state is State.BATCHED:
            move(db, turn, State.APPLIED)
    _end(db, row["number"], LeaseEnd.CONFIRMED, step)
    return step


def release(db: sqlite3.Connection, id: str) -> None:
    """End an open lease without a step."""
    row = db.execute("SELECT number FROM leases WHERE id = ? AND ended = ''", (id,)).fetchone()
    if row is not None:
        _give_back(db, row["number"], LeaseEnd.TAKEN_BACK)


def expire(db: sqlite3.Connection) -> int:
    """End the leases that have run out; how many there were."""
    rows = db.execute(EXPIRED, (time.time(),)).fetchall()
    for row in rows:
        _give_back(db, row["number"], LeaseEnd.RAN_OUT)
    return len(rows)


def any_expired(db: sqlite3.Connection) -> bool:
    """Whether `expire` has something to do."""
    return db.execute(f"{EXPIRED} LIMIT 1", (time.time(),)).fetchone() is not None


def open_leases(db: sqlite3.Connection) -> list[Lease]:
    """The leases that have not ended, the oldest first."""
    rows = db.execute("SELECT * FROM leases WHERE ended = '' ORDER BY number").fetchall()
    return [Lease(row["id"], tuple(_turns_of(db, row["number"])), row["created"], row["expires"]) for row in rows]


def last_end(db: sqlite3.Connection) -> LeaseEnd | None:
    """How the newest lease ended; None if it is open or there is none."""
    row = db.execute("SELECT ended FROM leases ORDER BY number DESC LIMIT 1").fetchone()
    return known(LeaseEnd, row["ended"], None) if row else None


def last_step(db: sqlite3.Connection) -> int:
    """The last step that counts."""
    (step,) = db.execute("SELECT coalesce(max(step), 0) FROM updates WHERE outcome = 'applied'").fetchone()
    return int(step)


def _give_back(db: sqlite3.Connection, number: int, end: LeaseEnd) -> None:
    for turn, state in _turns_of(db, number).items():
        # Others were deleted meanwhile, or are damaged.
        if state is State.BATCHED:
            move(db, turn, State.JUDGED)
    _end(db, number, end)


def _end(db: sqlite3.Connection, number: int, end: LeaseEnd, step: int | None = None) -> None:
    db.execute("DELETE FROM lease_turns WHERE lease = ?", (number,))
    db.execute("UPDATE leases SET ended = ?, step = ? WHERE number = ?", (end, step, number))


def _turns_of(db: sqlite3.Connection, number: int) -> dict[int, State | None]:
    """The turns of an open lease and their states; None for a turn that was deleted."""
    rows = db.execute(
        "SELECT l.turn, t.state FROM lease_turns l LEFT JOIN turns t ON t.number = l.turn WHERE l.lease = ? "
        "ORDER BY l.turn",
        (number,),
    )
    return {row["turn"]: None if row["state"] is None else known(State, row["state"], State.DROPPED) for row in rows}

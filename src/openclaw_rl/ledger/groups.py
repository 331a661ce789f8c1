"""Groups: the attempts at one task, whose rewards are compared with each other.

A group is open, then closed (it takes no further attempt), then settled: its turns are judged, and the means that its
rewards are compared with are recorded. Only settled groups are trained on.
"""

import sqlite3
import time
from statistics import fmean

from openclaw_rl.ledger.errors import BadResult
from openclaw_rl.ledger.sessions import IMPORTED
from openclaw_rl.types import SHARED, EpisodeState, GroupProgress, Queue, State, TurnKind

#: Closed groups of which no turn is still to be scored or judged.
JUDGED_GROUPS = (
    "SELECT number FROM groups g WHERE closed IS NOT NULL AND settled IS NULL AND NOT EXISTS "
    "(SELECT 1 FROM episodes e JOIN turns t ON t.session = e.session WHERE e.group_number = g.number "
    f"AND t.state IN ('{State.CAPTURED}', '{State.READY}'))"
)
TIMED_OUT = "SELECT number FROM groups WHERE settled IS NULL AND closed IS NULL AND first_reward < ?"
ENDED = "(SELECT count(*) FROM episodes e WHERE e.group_number = g.number)"
#: The judged turns that a step from feedback may take: those outside episodes, and those of rewarded episodes. Attempts
#: of a group wait until it is settled. A side turn is only judged if it is a practised answer (`practices`).
TRAINABLE = (
    "FROM turns t LEFT JOIN episodes e ON e.session = t.session LEFT JOIN groups g ON g.number = e.group_number "
    f"WHERE t.state = '{State.JUDGED}' AND t.kind = '{TurnKind.MAIN}' "
    f"AND (e.state IS NULL OR e.state = '{EpisodeState.REWARDED}') "
    "AND (g.number IS NULL OR g.settled IS NOT NULL)"
)
#: The judged turns that no step may take yet. Their number is small: groups that are not settled, and held episodes.
NOT_YET = (
    "SELECT count(*) FROM episodes e LEFT JOIN groups g ON g.number = e.group_number JOIN turns t "
    f"ON t.session = e.session WHERE t.state = '{State.JUDGED}' AND {{}}"
)
#: The judged turns of a settled group.
OF_GROUP = (
    "SELECT t.number FROM episodes e JOIN turns t ON t.session = e.session "
    f"WHERE e.group_number = ? AND e.state = '{EpisodeState.REWARDED}' AND t.state = '{State.JUDGED}' ORDER BY t.number"
)
#: The line that a turn `t` teaches where people have lines of their own: that of its owner; the shared one, if an
#: environment rewarded it or it was imported.
LINE_OF = (
    f"(SELECT CASE WHEN s.owner = '{IMPORTED}' OR EXISTS (SELECT 1 FROM episodes WHERE session = s.number) "
    f"THEN '{SHARED}' ELSE s.owner END FROM sessions s WHERE s.number = t.session)"
)
#: With a line (NULL: every turn), the turns that teach it.
OF_LINE = f"(?1 IS NULL OR {LINE_OF} = ?1)"


def join(db: sqlite3.Connection, owner: str, name: str, size: int | None, default: int) -> tuple[int, bool]:
    """The number of a group, and whether it still takes attempts. Its first attempt makes it. Raises BadResult."""
    row = db.execute("SELECT number, size, closed FROM groups WHERE owner = ? AND name = ?", (owner, name)).fetchone()
    if row is None:
        row = db.execute(
            "INSERT INTO groups (owner, name, size) VALUES (?, ?, ?) RETURNING number, size, closed",
            (owner, name, default if size is None else size),
        ).fetchone()
    elif size is not None and size != row["size"] and row["closed"] is None:
        raise BadResult(f"group_size: the group was begun with {row['size']} attempts, not {size}.", "group_size")
    return row["number"], row["closed"] is None


def count_attempt(db: sqlite3.Connection, group: int, *, rewarded: bool) -> None:
    """Count an attempt that has just been recorded; the last one closes the group."""
    if rewarded:
        db.execute("UPDATE groups SET first_reward = coalesce(first_reward, ?) WHERE number = ?", (time.time(), group))
    _close_if_complete(db, group)


def remove_attempt(db: sqlite3.Connection, group: int) -> None:
    """Adapt a group to an attempt that was deleted: it waits for one fewer, or its means are those of the others."""
    db.execute("UPDATE groups SET size = size - 1 WHERE number = ?", (group,))
    db.execute(f"DELETE FROM groups AS g WHERE number = ? AND {ENDED} = 0", (group,))
    _close_if_complete(db, group)
    if db.execute("SELECT 1 FROM groups WHERE number = ? AND settled IS NOT NULL", (group,)).fetchone():
        _settle(db, group)


def _close_if_complete(db: sqlite3.Connection, group: int) -> None:
    db.execute(
        f"UPDATE groups AS g SET closed = ? WHERE number = ? AND closed IS NULL AND {ENDED} >= size",
        (time.time(), group),
    )


def any_to_settle(db: sqlite3.Connection, opened_before: float) -> bool:
    """Whether `settle` has something to do."""
    return any(
        db.execute(f"{query} LIMIT 1", values).fetchone()
        for query, values in ((TIMED_OUT, (opened_before,)), (JUDGED_GROUPS, ()))
    )


def settle(db: sqlite3.Connection, opened_before: float) -> list[int]:
    """Close the groups whose first reward came before a time, and settle those whose turns are judged.

    Returns the groups that were settled. The means are those of the rewarded attempts, each counted once.
    """
    for row in db.execute(TIMED_OUT, (opened_before,)).fetchall():
        db.execute("UPDATE groups SET closed = ? WHERE number = ?", (time.time(), row["number"]))
    settled = [int(row["number"]) for row in db.execute(JUDGED_GROUPS).fetchall()]
    for group in settled:
        _settle(db, group)
    return settled


def _settle(db: sqlite3.Connection, group: int) -> None:
    """Record the means of a group's rewarded attempts."""
    rewards = [
        row["reward"]
        for row in db.execute(
            "SELECT reward FROM episodes WHERE group_number = ? AND state = ? ORDER BY session",
            (group, EpisodeState.REWARDED),
        )
    ]
    is_constant = len(rewards) > 1 and len(set(rewards)) == 1
    db.execute(
        "UPDATE groups SET settled = ?, mean = ?, rewarded = ?, constant = ? WHERE number = ?",
        (time.time(), mean(rewards), len(rewards), is_constant, group),
    )
    _settle_steps(db, group)


def _settle_steps(db: sqlite3.Connection, group: int) -> None:
    """Record the mean reward of each step that two or more attempts have a reward for."""
    db.execute("DELETE FROM group_steps WHERE group_number = ?", (group,))
    by_step: dict[int, list[float]] = {}
    for row in db.execute(
        "SELECT s.step, s.reward FROM episodes e JOIN turns t ON t.session = e.session "
        "JOIN episode_steps s ON s.turn = t.number WHERE e.group_number = ? AND e.state = ? AND s.reward IS NOT NULL "
        "ORDER BY t.number",
        (group, EpisodeState.REWARDED),
    ):
        by_step.setdefault(row["step"], []).append(row["reward"])
    db.executemany(
        "INSERT INTO group_steps (group_number, step, mean) VALUES (?, ?, ?)",
        [(group, step, mean(rewards)) for step, rewards in by_step.items() if len(rewards) > 1],
    )


def mean(rewards: list[float]) -> float | None:
    """The mean. Equal rewards are their own mean to the last bit; None without rewards."""
    if not rewards:
        return None
    return rewards[0] if len(set(rewards)) == 1 else fmean(rewards)


def first_good(db: sqlite3.Connection, line: str | None) -> int | None:
    """The turn with a score above 0 that a step may take and that was judged first; None if there is none."""
    good = "SELECT number FROM verdicts v WHERE v.turn = t.number AND v.score > 0"
    query = f"SELECT t.number, ({good}) AS place {TRAINABLE} AND place IS NOT NULL AND {OF_LINE} ORDER BY place"
    row = db.execute(query, (line,)).fetchone()
    return None if row is None else int(row["number"])


def next_units(db: sqlite3.Connection, count: int, first: int | None, line: str | None) -> list[int]:
    """The turns of the next step: single turns and whole groups, the longest judged first, at least `count` turns.

    All there are, if there are fewer. If turn `first` is given, the step has it. With `line`, they all teach it.
    """
    chosen: list[int] = []
    groups = set[int]()
    for row in db.execute(
        "SELECT t.number, g.number AS group_number, (SELECT v.number FROM verdicts v WHERE v.turn = t.number) AS place "
        f"{TRAINABLE} AND place IS NOT NULL AND {OF_LINE} ORDER BY t.number IS NOT ?2, place",
        (line, first),
    ):
        if len(chosen) >= count:
            break
        group = row["group_number"]
        if group is None:
            chosen.append(row["number"])
        elif group not in groups:
            groups.add(group)
            chosen += judged_turns(db, group)
    return chosen


def judged_turns(db: sqlite3.Connection, group: int) -> list[int]:
    """The turns of a group that a step may take once the group is settled."""
    return [int(row["number"]) for row in db.execute(OF_GROUP, (group,))]


def turns_of_failed_attempts(db: sqlite3.Connection) -> list[int]:
    """Judged turns whose episode failed after a step had used them, and that are to be trained on again."""
    rows = db.execute(
        "SELECT t.number FROM turns t JOIN episodes e ON e.session = t.session WHERE t.state = ? AND e.state = ?",
        (State.JUDGED, EpisodeState.FAILED),
    )
    return [int(row["number"]) for row in rows]


def stale_units(db: sqlite3.Connection, is_stale: str, oldest: int, line: str | None) -> list[int]:
    """The turns that are stale, and all turns of groups with such a turn.

    `is_stale` is an SQL condition on `t`, with the line as ?1 and the oldest step as ?2.

    A group is not compared with itself in part: what is left of it would push the policy in one direction.
    """
    query = f"SELECT t.number, g.number AS group_number {TRAINABLE} AND {OF_LINE} AND {is_stale}"
    rows = db.execute(query, (line, oldest)).fetchall()
    alone = [int(row["number"]) for row in rows if row["group_number"] is None]
    groups = {row["group_number"]: None for row in rows if row["group_number"] is not None}
    return alone + [turn for group in groups for turn in judged_turns(db, group)]


def trainable(db: sqlite3.Connection, line: str | None = None) -> int:
    """How many turns a step could take. It does not read every episode: it is asked for at each change."""
    if line is not None:
        return waiting_by_line(db).get(line, (0, 0))[0]
    unsettled = NOT_YET.format("e.group_number IN (SELECT number FROM groups WHERE settled IS NULL)")
    held = NOT_YET.format(f"e.state = '{EpisodeState.HELD}' AND e.group_number IS NULL")
    judged = f"SELECT count(*) FROM turns WHERE state = '{State.JUDGED}' AND kind = '{TurnKind.MAIN}'"
    (count,) = db.execute(f"SELECT ({judged}) - ({unsettled}) - ({held})").fetchone()
    return int(count)


def waiting_by_line(db: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """For each line that has some: how many turns a step could take, and how many practised answers wait."""
    counts: dict[str, tuple[int, int]] = {}
    practised = f"SELECT t.number FROM turns t WHERE t.state = '{State.JUDGED}' AND t.kind = '{TurnKind.SIDE}'"
    for place, turns in enumerate((f"SELECT t.number {TRAINABLE}", practised)):
        query = f"SELECT {LINE_OF} AS line, count(*) AS turns FROM turns t WHERE t.number IN ({turns}) GROUP BY 1"
        for row in db.execute(query):
            main, side = counts.get(row["line"], (0, 0))
            counts[row["line"]] = (main, row["turns"]) if place else (row["turns"], side)
    return counts


def queue(db: sqlite3.Connection) -> Queue:
    """Turns on their way to a training step."""
    (held,) = db.execute(
        "SELECT count(*) FROM episodes e JOIN turns t ON t.session = e.session WHERE e.state = ? AND t.state = ?",
        (EpisodeState.HELD, State.AWAITING),
    ).fetchone()
    states = "SELECT count(*) FROM turns WHERE state = ?"
    to_judge, to_train = (db.execute(states, (state,)).fetchone()[0] for state in (State.READY, State.JUDGED))
    return Queue(held, to_judge, to_train)


def waiting(db: sqlite3.Connection) -> list[GroupProgress]:
    """The groups that have a reward and wait for further attempts, the oldest first."""
    rows = db.execute(
        f"SELECT name, size, {ENDED} AS ended FROM groups g "
        "WHERE closed IS NULL AND first_reward IS NOT NULL ORDER BY number"
    )
    return [GroupProgress(row["name"], row["ended"], row["size"]) for row in rows]


def constant_since_last_step(db: sqlite3.Connection) -> int:
    """How many groups of equal rewards were settled since the last step, and have no turn that is trained on.

    Groups teach the shared line, so only its steps count.
    """
    (count,) = db.execute(
        "SELECT count(*) FROM groups g WHERE constant AND settled > coalesce("
        f"(SELECT max(created) FROM updates WHERE outcome = 'applied' AND line = '{SHARED}'), 0) AND NOT EXISTS "
        "(SELECT 1 FROM episodes e JOIN turns t ON t.session = e.session WHERE e.group_number = g.number "
        f"AND t.state IN ('{State.JUDGED}', '{State.BATCHED}', '{State.APPLIED}'))"
    ).fetchone()
    return int(count)

"""Training steps and the policies that they made.

A turn is in at most one step that counts; an imported turn in one for each epoch. A step counts (`applied`), was lost
when the learner crashed or restarted (`undone`: its turns can be trained on again), was rolled back (`rolled_back`) or
was refused (`quarantined`).

A step makes a new policy version from the one before it. A version that serves the weights of another one again, after
a rollback, is made from that one without a step.

A line is a sequence of policies that are made from each other: the shared one, or a person's own. Version numbers are
those of the whole run; steps are counted for each line apart.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openclaw_rl.ledger import episodes, groups
from openclaw_rl.ledger.packing import known, unpack_object
from openclaw_rl.ledger.sessions import IMPORTED, QUARANTINED, SET_ASIDE, move
from openclaw_rl.types import BASE_VERSION, SHARED, Batch, LeaseEnd, State, StepOutcome, Update

#: How a turn that waits or was dropped becomes one that was trained on, if a policy that contains it is loaded.
TOWARDS_APPLIED = {
    State.DROPPED: State.READY,
    State.READY: State.JUDGED,
    State.JUDGED: State.BATCHED,
    State.BATCHED: State.APPLIED,
}
#: The policies whose weights are in each policy. An average has those of the merged lines, and not those of the policy
#: that it replaced.
_HELD = (
    "(SELECT version, parent FROM merged_policies UNION ALL SELECT version, parent FROM policies "
    "WHERE version NOT IN (SELECT version FROM merged_policies))"
)
_MADE_BY = (
    "(SELECT max(u.step) FROM updates u WHERE u.version = {} AND u.outcome IN ('applied', 'undone') "
    f"AND u.line = coalesce(?1, '{SHARED}'))"
)
#: The step of line ?1 that produced a policy version or, if none did, the version that it was made from: an earlier
#: policy that serves again has a new number. A policy of another line counts as the one that this line began with.
STEP_OF = (
    f"coalesce((WITH RECURSIVE line (version, step) AS (SELECT {{0}}, {_MADE_BY.format('{0}')} UNION "
    f"SELECT p.parent, {_MADE_BY.format('p.parent')} FROM policies p JOIN line ON p.version = line.version "
    "WHERE line.step IS NULL) SELECT max(step) FROM line), 0)"
)


def claim(
    db: sqlite3.Connection,
    count: int,
    step: int,
    max_staleness: int,
    needs_good: bool = False,
    line: str | None = None,
) -> list[int]:
    """Take the next turns for the step after `step`, the longest judged first. Turns of too old a policy are dropped.

    With `line`, they are the turns that teach it; without, all turns teach the shared line.

    A group is taken or dropped as a whole, so there can be more than `count` turns. There are fewer only if no more
    can be taken. If it `needs_good`, one of them has a good score, or none is taken.
    A policy's age is counted in steps and not in versions: a step that was lost and repeated makes a new version, but
    the turns are no staler for it.
    """
    for turn in groups.turns_of_failed_attempts(db):
        move(db, turn, State.DROPPED, episodes.FAILED)
    is_stale = f"{STEP_OF.format('t.version')} < ?2"
    for turn in groups.stale_units(db, is_stale, step - max_staleness, line):
        move(db, turn, State.DROPPED, f"stale: answered more than {max_staleness} policy versions ago")
    good = groups.first_good(db, line) if needs_good else None
    turns = groups.next_units(db, count, good, line) if good or not needs_good else []
    for turn in turns:
        move(db, turn, State.BATCHED)
    # Sorted, because the order of a batch can change the last bits of its sums.
    return sorted(turns)


def claim_turns(db: sqlite3.Connection, turns: Sequence[int]) -> list[int]:
    """Take exactly these turns, as those of a step that was lost; none if one was forgotten or is judged again."""
    if any(_state(db, turn) is not State.JUDGED for turn in turns):
        return []
    for turn in turns:
        move(db, turn, State.BATCHED)
    return sorted(turns)


def release_batches(db: sqlite3.Connection, line: str | None = None) -> None:
    """Return the turns of a step that did not happen to those that can be trained on; with `line`, of its step.

    It also ends the leases of outside trainers: the caller's learner decides from now on.
    """
    db.execute("DELETE FROM lease_turns")
    db.execute("UPDATE leases SET ended = ? WHERE ended = ''", (LeaseEnd.TAKEN_BACK,))
    batched = f"SELECT t.number FROM turns t WHERE t.state = ?2 AND {groups.OF_LINE}"
    for row in db.execute(batched, (line, State.BATCHED)).fetchall():
        move(db, row["number"], State.JUDGED)


def apply_step(
    db: sqlite3.Connection,
    step: int,
    version: int,
    turns: Sequence[int],
    metrics: Mapping[str, Any] | None = None,
    parent: int | None = None,
    line: str = SHARED,
) -> None:
    """Record a step: its turns were trained on, and it made this policy version from `parent`.

    A step that was undone and is made again, under the same version, counts again.
    """
    undone = db.execute(
        "UPDATE updates SET outcome = ?, metrics = ?, created = ? WHERE version = ? AND outcome = ?",
        (StepOutcome.APPLIED, json.dumps(metrics or {}), time.time(), version, StepOutcome.UNDONE),
    )
    if not undone.rowcount:
        add_policy(db, version, _newest_before(db, step, version, line) if parent is None else parent, line=line)
        record_step(db, step, version, StepOutcome.APPLIED, turns, metrics=metrics, line=line)
    for turn in turns:
        move(db, turn, State.APPLIED)


def begin_epoch(db: sqlite3.Connection, epoch: int) -> int:
    """Let the imported turns that were trained on in fewer than `epoch` epochs be trained on again; how many they are.

    Turns whose steps were rolled back stay as they are. The policy scores the others again first, and their groups are
    settled again once all their turns are scored.
    """
    rows = db.execute(
        "SELECT t.number FROM turns t JOIN sessions s ON s.number = t.session WHERE s.owner = ? AND t.state = ? AND "
        "(SELECT count(*) FROM update_turns x JOIN updates u ON u.number = x.number "
        "WHERE x.turn = t.number AND u.outcome = ?) BETWEEN 1 AND ?",
        (IMPORTED, State.APPLIED, StepOutcome.APPLIED, epoch - 1),
    ).fetchall()
    for row in rows:
        move(db, row["number"], State.CAPTURED)
    db.execute(
        "UPDATE groups SET settled = NULL WHERE number IN (SELECT e.group_number FROM episodes e "
        "JOIN turns t ON t.session = e.session WHERE t.state = ?)",
        (State.CAPTURED,),
    )
    return len(rows)


def quarantine(db: sqlite3.Connection, step: int, turns: Sequence[int], reason: str, line: str = SHARED) -> None:
    """Record a step that was refused: its turns are set aside with the reason."""
    record_step(db, step, None, StepOutcome.QUARANTINED, turns, reason, line=line)
    for turn in turns:
        move(db, turn, State.DROPPED, f"{QUARANTINED}{reason}")


def reconcile(
    db: sqlite3.Connection,
    version: int,
    step: int,
    batches: Sequence[Batch],
    line: str = SHARED,
    takes: str | None = None,
) -> list[int]:
    """Make the ledger agree with a checkpoint of policy `version` at `step` of a line; the steps that were undone.

    The line's turns that were claimed are released: those that teach `takes`, or all.

    Steps in the checkpoint count, whether or not the ledger knew of them: the checkpoint remembers its last `batches`.
    Steps that made later versions were lost. Steps that are not in it and made earlier versions were rolled back.
    """
    release_batches(db, takes)
    for batch in batches:
        if not is_known_policy(db, batch.version):
            add_policy(db, batch.version, _newest_before(db, batch.step, batch.version, line), line=line)
            record_step(db, batch.step, batch.version, StepOutcome.UNDONE, batch.turns, line=line)
    infer_policies(db, {version: step}, line)
    return follow(db, version, undo_after=version, line=line)


def follow(db: sqlite3.Connection, version: int, undo_after: int | None = None, line: str = SHARED) -> list[int]:
    """Of the steps of a line, let exactly those in a policy count.

    Other steps that made versions after `undo_after` are undone, so that their turns can be trained on again, and are
    returned. So are those that came before an average which does not hold them. The rest are rolled back. The turns of
    those that `blame` gave a reason are set aside with it.
    """
    made_from = held_policies(db, version)
    left_out = set(policy_line(db, version)) - made_from
    undone = []
    for row in db.execute(
        "SELECT number, step, version, reason FROM updates WHERE line = ? AND outcome = ? ORDER BY step",
        (line, StepOutcome.APPLIED),
    ).fetchall():
        if row["version"] in made_from:
            continue
        is_undone = row["version"] in left_out or (undo_after is not None and row["version"] > undo_after)
        _set_outcome(db, row["number"], StepOutcome.UNDONE if is_undone else StepOutcome.ROLLED_BACK)
        if is_undone:
            undone.append(row["step"])
        for turn, state in _turns_in(db, row["number"]).items():
            if state is State.APPLIED and is_undone:
                move(db, turn, State.JUDGED)
            elif state is State.APPLIED and row["reason"]:
                move(db, turn, State.DROPPED, row["reason"])
    for row in db.execute(
        "SELECT number, version FROM updates WHERE line = ? AND outcome IN (?, ?)",
        (line, StepOutcome.UNDONE, StepOutcome.ROLLED_BACK),
    ).fetchall():
        if row["version"] in made_from:
            _set_outcome(db, row["number"], StepOutcome.APPLIED)
            for turn, state in _turns_in(db, row["number"]).items():
                _move_to_applied(db, turn, state)
    return undone


def blame(db: sqlite3.Connection, versions: Iterable[int], reason: str, line: str = SHARED) -> int:
    """Say why the steps of a line that made these policies will be rolled back; how many turns they have.

    It comes before the rollback: killed in between, the next one still sets the turns aside.
    """
    which = "line = ? AND outcome = ? AND version IN (SELECT value FROM json_each(?))"
    values = (line, StepOutcome.APPLIED, json.dumps(list(versions)))
    db.execute(f"UPDATE updates SET reason = ? WHERE {which}", (reason, *values))
    (turns,) = db.execute(
        f"SELECT count(*) FROM update_turns WHERE number IN (SELECT number FROM updates WHERE {which})", values
    ).fetchone()
    return int(turns)


def take_up_again(db: sqlite3.Connection, line: str) -> int:
    """Let the turns that the guard set aside be trained on all the same; how many there are."""
    taken = 0
    for row in db.execute(
        "SELECT number, reason FROM updates WHERE line = ? AND outcome = ? AND instr(reason, ?) = 1",
        (line, StepOutcome.ROLLED_BACK, SET_ASIDE),
    ).fetchall():
        _set_outcome(db, row["number"], StepOutcome.UNDONE)
        for turn, state in _turns_in(db, row["number"]).items():
            if state is State.DROPPED and _reason(db, turn) == row["reason"]:
                move(db, turn, State.READY)
                move(db, turn, State.JUDGED)
                taken += 1
    return taken


def steps_after(db: sqlite3.Connection, version: int, line: str = SHARED) -> list[Batch]:
    """The steps of a line that led from a policy version to the newest one that was made from it, in their order.

    A server that continues from the version makes them again. Steps that were rolled back are not among them.
    """
    made = (StepOutcome.APPLIED, StepOutcome.UNDONE)
    rows = db.execute(
        "SELECT number, step, version FROM updates WHERE line = ? AND outcome IN (?, ?) AND version > ? "
        "ORDER BY version DESC",
        (line, *made, version),
    ).fetchall()
    for newest in rows:
        made_from = policy_line(db, newest["version"])
        if version == BASE_VERSION or version in made_from:
            return [
                Batch(row["step"], row["version"], tuple(_turns_in(db, row["number"])))
                for row in reversed(rows)
                if row["version"] in made_from
            ]
    return []


def newest_steps(db: sqlite3.Connection) -> dict[str, int]:
    """For each line: the version that its last step made which was not rolled back."""
    made = (StepOutcome.APPLIED, StepOutcome.UNDONE)
    rows = db.execute("SELECT line, max(version) FROM updates WHERE outcome IN (?, ?) GROUP BY line", made)
    return {line: int(version) for line, version in rows if version is not None}


def give_up(db: sqlite3.Connection, batches: Sequence[Batch], takes: str | None = None) -> None:
    """Roll lost steps back before they are made again: their turns are not trained on any more.

    Turns that were claimed are released: those that teach the line `takes`, or all.
    """
    release_batches(db, takes)
    for batch in batches:
        db.execute(
            "UPDATE updates SET outcome = ? WHERE version = ? AND outcome = ?",
            (StepOutcome.ROLLED_BACK, batch.version, StepOutcome.UNDONE),
        )
        for turn in batch.turns:
            _move_to_applied(db, turn, _state(db, turn))


def load_steps(db: sqlite3.Connection) -> list[Update]:
    """All training steps, in the order they were made."""
    rows = db.execute("SELECT * FROM updates ORDER BY number").fetchall()
    return [
        Update(
            row["number"],
            row["step"],
            row["version"],
            known(StepOutcome, row["outcome"], StepOutcome.UNDONE),
            tuple(_turns_in(db, row["number"])),
            row["reason"],
            metrics_of(row),
            row["created"],
        )
        for row in rows
    ]


def metrics_of(row: sqlite3.Row) -> dict[str, Any]:
    """The metrics of a step; none if they are damaged."""
    try:
        return unpack_object(row["metrics"])
    except (ValueError, TypeError, RecursionError):
        return {}


def record_step(
    db: sqlite3.Connection,
    step: int,
    version: int | None,
    outcome: StepOutcome,
    turns: Sequence[int],
    reason: str = "",
    metrics: Mapping[str, Any] | None = None,
    line: str = SHARED,
) -> None:
    """Record a step and its turns, whose states stay as they are."""
    row = db.execute(
        "INSERT INTO updates (step, version, outcome, reason, metrics, created, line) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "RETURNING number",
        (step, version, outcome, reason, json.dumps(metrics or {}), time.time(), line),
    ).fetchone()
    db.executemany("INSERT INTO update_turns (number, turn) VALUES (?, ?)", [(row["number"], turn) for turn in turns])


def add_policy(db: sqlite3.Connection, version: int, parent: int, label: str = "", line: str = SHARED) -> None:
    """Record a policy before it serves or is saved. A number that another policy has raises sqlite3.IntegrityError.

    `label` is what the inference servers call its weights, if an outside trainer made them.
    """
    values = (version, parent, label, line)
    db.execute("INSERT INTO policies (version, parent, label, line) VALUES (?, ?, ?, ?)", values)


def add_merged(db: sqlite3.Connection, version: int, parents: Iterable[int]) -> None:
    """Record that a policy was made from these too."""
    db.executemany("INSERT INTO merged_policies VALUES (?, ?)", [(version, parent) for parent in parents])


def add_weights(db: sqlite3.Connection, version: int, parent: int, label: str) -> None:
    """Record weights of an outside trainer, which followed those of `parent`.

    They hold the steps that the trainer has confirmed, also if it confirmed them before it pushed any weights.
    """
    (last,) = db.execute(
        "SELECT coalesce(max(version), 0) FROM updates WHERE outcome = ?", (StepOutcome.APPLIED,)
    ).fetchone()
    add_policy(db, version, max(parent, last), label)


def weights_label(db: sqlite3.Connection, version: int) -> str:
    """What the inference servers call a policy's weights; empty if they are not an outside trainer's."""
    row = db.execute("SELECT label FROM policies WHERE version = ?", (version,)).fetchone()
    return str(row["label"]) if row else ""


def is_known_policy(db: sqlite3.Connection, version: int) -> bool:
    return db.execute("SELECT 1 FROM policies WHERE version = ?", (version,)).fetchone() is not None


def policy_line(db: sqlite3.Connection, version: int) -> list[int]:
    """A version and those that led to it, the newest first, without the base model."""
    rows = db.execute(
        "WITH RECURSIVE line (version) AS (SELECT ?1 UNION"
        " SELECT p.parent FROM policies p JOIN line ON p.version = line.version)"
        " SELECT version FROM line WHERE version != ?2 ORDER BY version DESC",
        (version, BASE_VERSION),
    )
    return [row["version"] for row in rows]


def held_policies(db: sqlite3.Connection, version: int) -> set[int]:
    """The versions whose training is in the weights of a policy, with its own."""
    rows = db.execute(
        "WITH RECURSIVE held (version) AS (SELECT ? UNION"
        f" SELECT p.parent FROM {_HELD} p JOIN held ON p.version = held.version) SELECT version FROM held",
        (version,),
    )
    return {row["version"] for row in rows}


def steps_with(db: sqlite3.Connection, turns: Iterable[int]) -> list[int]:
    """The training steps that used these turns and made a policy, whether or not they count."""
    rows = db.execute(
        "SELECT DISTINCT s.step FROM updates s JOIN update_turns u ON u.number = s.number "
        "WHERE u.turn IN (SELECT value FROM json_each(?)) AND s.version IS NOT NULL ORDER BY s.step",
        (json.dumps(list(turns)),),
    )
    return [row["step"] for row in rows]


def versions_with(db: sqlite3.Connection, turns: Iterable[int]) -> set[int]:
    """The policy versions that were trained on at least one of these turns."""
    rows = db.execute(
        "WITH RECURSIVE trained (version) AS ("
        " SELECT s.version FROM updates s JOIN update_turns u ON u.number = s.number"
        " WHERE u.turn IN (SELECT value FROM json_each(?)) AND s.version IS NOT NULL"
        f" UNION SELECT p.version FROM {_HELD} p"
        " JOIN trained ON p.parent = trained.version)"
        " SELECT version FROM trained",
        (json.dumps(list(turns)),),
    )
    return {row["version"] for row in rows}


def versions_with_deleted_turns(db: sqlite3.Connection, line: str | None = None) -> set[int]:
    """The policy versions, of one line or of all, that were trained on turns that were deleted since."""
    own = db.execute("SELECT version FROM policies WHERE line = ?", (line,))
    versions = versions_with(db, deleted_turns(db))
    return versions if line is None else versions & {row["version"] for row in own}


def deleted_turns(db: sqlite3.Connection) -> list[int]:
    """The turns that steps were made from and that were deleted since."""
    rows = db.execute("SELECT DISTINCT turn FROM update_turns WHERE turn NOT IN (SELECT number FROM turns)")
    return [row["turn"] for row in rows]


def infer_policies(db: sqlite3.Connection, steps: Mapping[int, int], line: str = SHARED) -> None:
    """Record policy versions of a line that the ledger does not know, given the step of each.

    Programs before the record of policies gave a policy a new number when they rolled back to it. Such a policy counts
    as made from the newest one up to its step.
    """
    for version, step in steps.items():
        if version and not is_known_policy(db, version):
            add_policy(db, version, _newest_before(db, step + 1, version, line), line=line)


def lines_of(db: sqlite3.Connection, versions: Iterable[int]) -> set[str]:
    """The lines that have these policy versions."""
    query = "SELECT DISTINCT line FROM policies WHERE version IN (SELECT value FROM json_each(?))"
    return {row["line"] for row in db.execute(query, (json.dumps(list(versions)),))}


def last_step_at(db: sqlite3.Connection, versions: Iterable[int]) -> float:
    """When the last step in these policies was recorded; 0 if there is none."""
    made_from = {one for version in versions for one in policy_line(db, version)}
    query = "SELECT coalesce(max(created), 0) FROM updates WHERE version IN (SELECT value FROM json_each(?))"
    (created,) = db.execute(query, (json.dumps(list(made_from)),)).fetchone()
    return float(created)


def latest_version(db: sqlite3.Connection) -> int:
    """The highest policy version in the ledger: a number is never used for two policies."""
    (version,) = db.execute(
        "SELECT max(coalesce((SELECT max(version) FROM policies), 0), coalesce((SELECT max(version) FROM turns), 0))"
    ).fetchone()
    return int(version)


def _set_outcome(db: sqlite3.Connection, number: int, outcome: StepOutcome) -> None:
    # Only what was rolled back keeps the reason for it.
    reason = "reason" if outcome is StepOutcome.ROLLED_BACK else "''"
    db.execute(f"UPDATE updates SET outcome = ?, reason = {reason} WHERE number = ?", (outcome, number))


def _state(db: sqlite3.Connection, turn: int) -> State | None:
    row = db.execute("SELECT state FROM turns WHERE number = ?", (turn,)).fetchone()
    return None if row is None else known(State, row["state"], State.DROPPED)


def _reason(db: sqlite3.Connection, turn: int) -> str:
    return str(db.execute("SELECT reason FROM turns WHERE number = ?", (turn,)).fetchone()["reason"])


def _newest_before(db: sqlite3.Connection, step: int, version: int, line: str) -> int:
    """The newest policy of a line before a version that an earlier step made; 0, the base model, if there is none."""
    (newest,) = db.execute(
        "SELECT coalesce(max(version), 0) FROM updates WHERE line = ? AND step < ? AND version < ?",
        (line, step, version),
    ).fetchone()
    return int(newest)


def _move_to_applied(db: sqlite3.Connection, turn: int, state: State | None) -> None:
    """Count a turn as trained on, if it is on its way there."""
    while state in TOWARDS_APPLIED:
        state = TOWARDS_APPLIED[state]
        move(db, turn, state)


def _turns_in(db: sqlite3.Connection, number: int) -> dict[int, State | None]:
    """The turns of a step and their states; None for a turn that was deleted."""
    rows = db.execute(
        "SELECT u.turn, t.state FROM update_turns u LEFT JOIN turns t ON t.number = u.turn "
        "WHERE u.number = ? ORDER BY u.turn",
        (number,),
    )
    return {row["turn"]: None if row["state"] is None else known(State, row["state"], State.DROPPED) for row in rows}

"""Episodes: how they begin, are rewarded and fail, and how they are described in words."""

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from openclaw_rl.ledger import groups
from openclaw_rl.ledger.errors import AlreadyRewarded, BadResult, TooLate, UnknownSession
from openclaw_rl.ledger.packing import known, pack_json, whole_text
from openclaw_rl.ledger.sessions import ALREADY_USED, QUARANTINED, SUPERSEDED, close_idle_sessions, move, open_session
from openclaw_rl.types import (
    EpisodeCounts,
    EpisodeMode,
    EpisodeResult,
    EpisodeState,
    EpisodeSummary,
    GroupProgress,
    SampleKind,
    SessionKey,
    Source,
    State,
    TurnEpisode,
    TurnKind,
    TurnResult,
)

#: Why turns of an episode are not trained on. The episode itself has the environment's own words.
FAILED = "its episode failed"
EVALUATED = "its episode is an evaluation"
#: Why an episode failed, where no environment said it.
ABANDONED = "abandoned: nothing was heard of it within --session-timeout"
GROUP_WAS_CLOSED = "too late: its group was closed"
#: Groups whose progress is listed.
MAX_GROUPS_LISTED = 5
EPISODES = (
    "SELECT e.*, g.name, g.size, g.mean, g.rewarded, g.constant "
    "FROM episodes e LEFT JOIN groups g ON g.number = e.group_number"
)


def begin(db: sqlite3.Connection, key: SessionKey, source: str, mode: EpisodeMode) -> None:
    """Make a session an episode, unless it is one already. Turns that were ready or judged await its reward too.

    One request that asks for an evaluation makes the whole episode one.
    """
    session = open_session(db, key, source, time.time())
    added = db.execute(
        "INSERT INTO episodes (session, mode, state) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
        (session, mode, EpisodeState.HELD),
    )
    if mode is EpisodeMode.EVAL:
        db.execute("UPDATE episodes SET mode = ? WHERE session = ? AND state = ?", (mode, session, EpisodeState.HELD))
    if added.rowcount:
        for row in _main_turns(db, session):
            if row["state"] in (State.READY, State.JUDGED):
                move(db, row["number"], State.AWAITING)


def end(db: sqlite3.Connection, key: SessionKey, result: EpisodeResult, group_size: int) -> str:
    """Record how an episode ended. Returns why it comes too late for its group; empty if it does not.

    Its turns can then be judged, or are dropped if it failed, came too late or is an evaluation. The same result again
    changes nothing. Raises UnknownSession, AlreadyRewarded, TooLate and BadResult.
    """
    digest = blake2b(pack_json(asdict(result)).encode(), digest_size=16).digest()
    session = _find(db, key, result)
    episode = db.execute("SELECT * FROM episodes WHERE session = ?", (session,)).fetchone()
    if episode is not None and episode["state"] != EpisodeState.HELD:
        return _ended_before(episode, digest)
    turns = _counted(_main_turns(db, session))
    if any(row["state"] in ALREADY_USED for row in turns):
        raise TooLate("A turn of this session has already been trained on.")
    said = _by_turn(turns, result)
    mode = known(EpisodeMode, episode["mode"], EpisodeMode.EVAL) if episode is not None else EpisodeMode.TRAIN
    group, late = None, ""
    if result.group is not None and mode is EpisodeMode.TRAIN:
        group, is_open = groups.join(db, key.owner, result.group, result.group_size, group_size)
        late = "" if is_open else GROUP_WAS_CLOSED
    state = EpisodeState.FAILED if late or result.error is not None else EpisodeState.REWARDED
    db.execute(
        "INSERT INTO episodes (session, mode, state, task, group_number, reward, solved, error, result, ended) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET state = excluded.state, task = excluded.task, "
        "group_number = excluded.group_number, reward = excluded.reward, solved = excluded.solved, "
        "error = excluded.error, result = excluded.result, ended = excluded.ended",
        (
            session,
            mode,
            state,
            whole_text(result.task),
            group,
            result.reward,
            result.solved,
            whole_text(late or result.error or ""),
            digest,
            time.time(),
        ),
    )
    for step, (row, one) in enumerate(zip(turns, said, strict=True)):
        if result.reward is not None:
            _reward_turn(db, row["number"], step, result.reward, one)
        _pass_on(db, row, state, mode)
    _close_session(db, session)
    if group is not None and not late:
        groups.count_attempt(db, group, rewarded=state is EpisodeState.REWARDED)
    return late


def close_idle(db: sqlite3.Connection, seconds: float) -> int:
    """Close the sessions that were idle for `seconds`; returns how many. Episodes without a reward have failed."""
    before = time.time() - seconds
    return abandon_idle(db, before) + close_idle_sessions(db, before)


def abandon_idle(db: sqlite3.Connection, before: float) -> int:
    """End the held episodes whose last request was before a time, as failed; returns how many."""
    rows = db.execute(
        "SELECT s.number FROM episodes e JOIN sessions s ON s.number = e.session WHERE e.state = ? AND s.last < ?",
        (EpisodeState.HELD, before),
    ).fetchall()
    for row in rows:
        db.execute(
            "UPDATE episodes SET state = ?, error = ?, ended = ? WHERE session = ?",
            (EpisodeState.FAILED, ABANDONED, time.time(), row["number"]),
        )
        for turn in _main_turns(db, row["number"]):
            _pass_on(db, turn, EpisodeState.FAILED, EpisodeMode.TRAIN)
        _close_session(db, row["number"])
    return len(rows)


def settle_groups(db: sqlite3.Connection, opened_before: float, why_untrained: Callable[[TurnEpisode], str]) -> None:
    """Settle groups, and drop their turns that train on the reward alone where `why_untrained` has a reason."""
    for group in groups.settle(db, opened_before):
        rows = db.execute(
            "SELECT t.number, t.session FROM episodes e JOIN turns t ON t.session = e.session "
            "JOIN verdicts v ON v.turn = t.number WHERE e.group_number = ? AND t.state = ? AND v.sample = ?",
            (group, State.JUDGED, SampleKind.RL),
        ).fetchall()
        for row in rows:
            episode = of_turn(db, row["number"], row["session"])
            assert episode is not None
            if reason := why_untrained(episode):
                move(db, row["number"], State.DROPPED, reason)


def counts(db: sqlite3.Connection) -> EpisodeCounts:
    rows = db.execute("SELECT state, count(*) FROM episodes GROUP BY state")
    states = Counter({known(EpisodeState, state, None): count for state, count in rows})
    reward, solved = db.execute(
        "SELECT avg(reward), avg(solved) FROM episodes WHERE state = ?", (EpisodeState.REWARDED,)
    ).fetchone()
    return EpisodeCounts({state: states[state] for state in EpisodeState}, reward, solved)


def of_session(db: sqlite3.Connection, session: int) -> EpisodeSummary | None:
    row = db.execute(f"{EPISODES} WHERE e.session = ?", (session,)).fetchone()
    return None if row is None else EpisodeSummary(**_summary(row))


def of_turn(db: sqlite3.Connection, turn: int, session: int) -> TurnEpisode | None:
    row = db.execute(f"{EPISODES} WHERE e.session = ?", (session,)).fetchone()
    if row is None:
        return None
    step = db.execute(
        "SELECT s.step, s.reward, g.mean FROM episode_steps s LEFT JOIN group_steps g "
        "ON g.group_number = ? AND g.step = s.step WHERE s.turn = ?",
        (row["group_number"], turn),
    ).fetchone()
    step_of, reward, mean = step or (None, None, None)
    return TurnEpisode(**_summary(row), step=step_of, step_reward=reward, step_mean=mean)


def _summary(row: sqlite3.Row) -> dict[str, Any]:
    return {
        "mode": known(EpisodeMode, row["mode"], EpisodeMode.EVAL),
        "state": known(EpisodeState, row["state"], EpisodeState.FAILED),
        "task": row["task"],
        "group": row["name"],
        "reward": row["reward"],
        "solved": None if row["solved"] is None else bool(row["solved"]),
        "error": row["error"],
        "group_mean": row["mean"],
        "rewarded": row["rewarded"] or 0,
        "is_constant": bool(row["constant"]),
        "group_size": row["size"],
    }


def _find(db: sqlite3.Connection, key: SessionKey, result: EpisodeResult) -> int:
    """The session's number. An attempt that failed before its first turn gets a session: its group counts it."""
    row = db.execute("SELECT number FROM sessions WHERE owner = ? AND id = ?", key).fetchone()
    if row is not None:
        return int(row["number"])
    if result.error is None or result.group is None:
        raise UnknownSession(f"You have no session {key.id!r}.")
    return open_session(db, key, "reward", time.time())


def _ended_before(episode: sqlite3.Row, digest: bytes) -> str:
    """The answer to a result of an episode that has ended."""
    if episode["result"] is None:
        raise TooLate(f"The episode has ended without a reward: {episode['error']}.")
    if episode["result"] != digest:
        raise AlreadyRewarded("The episode has ended already, with another result.")
    return GROUP_WAS_CLOSED if episode["error"] == GROUP_WAS_CLOSED else ""


def _main_turns(db: sqlite3.Connection, session: int) -> list[sqlite3.Row]:
    return db.execute(
        "SELECT number, completion, state, reason, next_state IS NOT NULL AS continued FROM turns "
        "WHERE session = ? AND kind = ? ORDER BY number",
        (session, TurnKind.MAIN),
    ).fetchall()


def _counted(turns: Sequence[sqlite3.Row]) -> list[sqlite3.Row]:
    """The turns that are steps of their episode: not those that a retry replaced, nor those of a refused batch."""
    return [
        row
        for row in turns
        if (row["reason"] != SUPERSEDED or row["continued"]) and not row["reason"].startswith(QUARANTINED)
    ]


def _by_turn(turns: Sequence[sqlite3.Row], result: EpisodeResult) -> list[TurnResult]:
    """What was said about each turn. Raises BadResult for a turn that is not there or is named twice."""
    said = [TurnResult()] * len(turns)
    completions = [row["completion"] for row in turns]
    for place, one in enumerate(result.steps):
        index = one.index if one.index is not None else completions.index(one.id) if one.id in completions else -1
        if not 0 <= index < len(turns):
            given = f"index {one.index}" if one.index is not None else f"id {one.id!r}"
            raise BadResult(f"steps.{place}: the episode has no turn with {given}; it has {len(turns)} turns.", "steps")
        if said[index] != TurnResult():
            raise BadResult(f"steps.{place}: turn {index} is named twice.", "steps")
        said[index] = one
    if turns and result.text:
        text = "\n".join(filter(None, (said[-1].text, result.text)))
        said[-1] = TurnResult(reward=said[-1].reward, text=text)
    return said


def _reward_turn(db: sqlite3.Connection, turn: int, step: int, reward: float, said: TurnResult) -> None:
    db.execute(
        "INSERT INTO feedback (turn, score, text, source, created) VALUES (?, ?, ?, ?, ?)",
        (turn, reward, whole_text(said.text), Source.ENVIRONMENT, time.time()),
    )
    db.execute("INSERT INTO episode_steps (turn, step, reward) VALUES (?, ?, ?)", (turn, step, said.reward))


def _pass_on(db: sqlite3.Connection, turn: sqlite3.Row, state: EpisodeState, mode: EpisodeMode) -> None:
    """Let a turn of an episode that has ended be judged, or drop it."""
    reason = FAILED if state is EpisodeState.FAILED else EVALUATED if mode is EpisodeMode.EVAL else ""
    if reason:
        if turn["state"] not in (State.DROPPED, *ALREADY_USED):
            move(db, turn["number"], State.DROPPED, reason)
    # An imported turn is scored by the policy first.
    elif turn["state"] not in (State.READY, State.CAPTURED):
        move(db, turn["number"], State.READY)


def _close_session(db: sqlite3.Connection, session: int) -> None:
    db.execute("UPDATE sessions SET closed = ? WHERE number = ?", (time.time(), session))


def outcome(episode: EpisodeSummary) -> str:
    """How an episode ended, in a few words."""
    if episode.state is EpisodeState.HELD:
        return "waits for its reward"
    if episode.state is EpisodeState.FAILED:
        return f"failed: {episode.error}"
    solved = {True: ", solved", False: ", not solved", None: ""}[episode.solved]
    return f"reward {episode.reward:+g}{solved}"


def describe(episode: EpisodeSummary) -> str:
    """An episode in one line."""
    mean = f"mean of its group {episode.group_mean:+g}" if episode.group_mean is not None else ""
    parts = (
        "evaluation" if episode.mode is EpisodeMode.EVAL else "episode",
        f"task {episode.task}" if episode.task else "",
        f"group {episode.group}" if episode.group else "",
        outcome(episode),
        mean and f"{mean} ({episode.rewarded} attempts)",
    )
    return " · ".join(filter(None, parts))


def describe_step(episode: TurnEpisode, advantage: float | None) -> str:
    """A turn's step in its episode, in one line; empty if it is none. The advantage is None if there is none."""
    if episode.step is None:
        return ""
    own = f"reward of this step {episode.step_reward:+g}" if episode.step_reward is not None else ""
    mean = f" (mean {episode.step_mean:+g})" if own and episode.step_mean is not None else ""
    parts = (f"step {episode.step}", own + mean, f"advantage {advantage:+g}" if advantage is not None else "")
    return " · ".join(filter(None, parts))


def groups_waiting(groups: Sequence[GroupProgress]) -> str:
    """A sentence about the groups that wait for attempts; empty if there are none."""
    if not groups:
        return ""
    listed = [f"{group.ended} of {group.size}" for group in groups[:MAX_GROUPS_LISTED]]
    more = ", …" if len(groups) > MAX_GROUPS_LISTED else ""
    count = "1 group waits" if len(groups) == 1 else f"{len(groups)} groups wait"
    return f"{count} for attempts: {', '.join(listed)}{more}."

"""Verdicts: how they are stored, read, and completed when a session ends."""

import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from statistics import fmean

from openclaw_rl.ledger import notes
from openclaw_rl.ledger.errors import DamagedTurn
from openclaw_rl.ledger.packing import (
    damage,
    known,
    pack_floats,
    pack_json,
    pack_table,
    pack_top,
    unpack_floats,
    unpack_json,
    unpack_table,
    unpack_top,
    whole_text,
)
from openclaw_rl.ledger.sessions import QUARANTINED, move
from openclaw_rl.types import (
    Feedback,
    HeardWishes,
    Hint,
    Question,
    SampleKind,
    Sign,
    Source,
    State,
    Verdict,
    VerdictCounts,
    VerdictSummary,
    Vote,
)

#: Practised answers are not among the verdicts that are listed: nobody judged them.
SUMMARIES = (
    "SELECT number, score, source, reason, (SELECT count(*) FROM hints h WHERE h.turn = v.turn) AS hints, "
    "CASE WHEN score > 0 THEN 'good' WHEN score < 0 THEN 'bad' WHEN score = 0 THEN 'neutral' ELSE 'abstained' END "
    f"AS sign FROM verdicts v WHERE source IS NOT '{Source.PRACTICE}'"
)
#: The reason of a verdict that was raised because its session had no good turn.
AT_LEAST_ONE = "the best turn of a session without a good one"
#: Judging is checked over this many of the last verdicts.
COLLAPSE_WINDOW = 50
#: A larger share of abstentions among them is reported as trouble.
MAX_ABSTENTIONS = 0.8
ADVICE = (
    "Look at some of them (openclaw-rl sessions ID): does the next message give feedback, and does the judge see it?"
)


def record(
    db: sqlite3.Connection,
    turn: int,
    verdict: Verdict,
    sample: SampleKind | None,
    reason: str,
    heard: int,
    step_reward: float | None = None,
    wishes: HeardWishes | None = None,
) -> bool:
    """Store a verdict: the turn is then judged, or dropped for a reason if there is nothing to train on.

    `wishes` are what the user asked for around the turn, of which notes are kept; None if no notes are kept.

    `step_reward` is what a judge gives to the turn as a step of its episode, if it was asked.
    `heard` is how many pieces of explicit feedback the judge saw. If there are more by now, or the turn is no longer
    ready, nothing is stored and False is returned.
    """
    row = db.execute(
        "SELECT state, (SELECT count(*) FROM feedback WHERE turn = number) AS said FROM turns WHERE number = ?", (turn,)
    ).fetchone()
    if row is None or row["state"] != State.READY or row["said"] != heard:
        return False
    store(db, turn, verdict, sample)
    if step_reward is not None:
        db.execute("UPDATE episode_steps SET reward = ? WHERE turn = ?", (step_reward, turn))
    if wishes is not None:
        notes.learn_from_verdict(db, turn, verdict.score, wishes)
    move(db, turn, State.JUDGED if sample else State.DROPPED, "" if sample else whole_text(reason))
    return True


def store(db: sqlite3.Connection, turn: int, verdict: Verdict, sample: SampleKind | None) -> None:
    """Store a verdict in place of an earlier one."""
    votes = pack_json([asdict(vote) for vote in verdict.votes])
    reason = whole_text(verdict.reason)
    problem = whole_text(verdict.plain_problem)
    values = (turn, verdict.score, verdict.source, reason, votes, verdict.seconds, sample, time.time(), problem)
    db.execute("DELETE FROM verdicts WHERE turn = ?", (turn,))
    db.execute("DELETE FROM hints WHERE turn = ?", (turn,))
    db.execute(
        "INSERT INTO verdicts (turn, score, source, reason, votes, seconds, sample, created, plain_problem) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        values,
    )
    db.execute(
        "UPDATE prompts_without_notes SET logprobs = ? WHERE turn = ?", (pack_floats(verdict.plain_logprobs), turn)
    )
    for place, hint in enumerate(verdict.hints):
        db.execute(
            "INSERT INTO hints (turn, place, text, logprobs, problem, top, of_policy_top, policy_scores) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (turn, place, *pack_hint(hint)),
        )


def pack_hint(hint: Hint) -> tuple[str, bytes, str, bytes | None, bytes | None, bytes | None]:
    """A hint's columns, from its text on."""
    tables = (pack_top(hint.top), pack_table(hint.of_policy_top), pack_table(hint.policy_scores))
    return whole_text(hint.text), pack_floats(hint.logprobs), whole_text(hint.problem), *tables


def unpack_hint(row: sqlite3.Row) -> Hint:
    tables = (unpack_top(row["top"]), unpack_table(row["of_policy_top"]), unpack_table(row["policy_scores"]))
    return Hint(row["text"], unpack_floats(row["logprobs"]), row["problem"], *tables)


def feedback_of(db: sqlite3.Connection, turn: int) -> list[Feedback]:
    """The explicit feedback on a turn, in the order it was given."""
    rows = db.execute("SELECT * FROM feedback WHERE turn = ? ORDER BY rowid", (turn,))
    return [
        Feedback(row["score"], row["text"], Source(row["source"]), row["correction"], row["created"]) for row in rows
    ]


def load(db: sqlite3.Connection, turn: int) -> tuple[Verdict, SampleKind | None] | None:
    """A turn's verdict and what it is trained on, if it has been judged. Raises DamagedTurn."""
    with damage(turn):
        return _load(db, turn)


def _load(db: sqlite3.Connection, turn: int) -> tuple[Verdict, SampleKind | None] | None:
    row = db.execute("SELECT * FROM verdicts WHERE turn = ?", (turn,)).fetchone()
    if row is None:
        return None
    hints = db.execute("SELECT * FROM hints WHERE turn = ? ORDER BY place", (turn,))
    plain = db.execute("SELECT logprobs FROM prompts_without_notes WHERE turn = ?", (turn,)).fetchone()
    verdict = Verdict(
        score=None if row["score"] is None else float(row["score"]),
        source=Source(row["source"]) if row["source"] else None,
        hints=tuple(map(unpack_hint, hints)),
        votes=tuple(Vote(**{**vote, "question": Question(vote["question"])}) for vote in unpack_json(row["votes"])),
        reason=row["reason"],
        seconds=row["seconds"],
        plain_logprobs=unpack_floats(plain["logprobs"]) if plain else (),
        plain_problem=row["plain_problem"],
    )
    return verdict, SampleKind(row["sample"]) if row["sample"] else None


def summaries(db: sqlite3.Connection) -> list[VerdictSummary]:
    """All verdicts, in the order they were given."""
    return [_summary(row) for row in db.execute(f"{SUMMARIES} ORDER BY number")]


def recent(db: sqlite3.Connection, count: int) -> list[VerdictSummary]:
    """The last verdicts, the newest first, without the rewards of environments."""
    query = f"{SUMMARIES} AND source IS NOT ? ORDER BY number DESC LIMIT ?"
    return [_summary(row) for row in db.execute(query, (Source.ENVIRONMENT, count))]


def judging_trouble(db: sqlite3.Connection) -> str:
    """What is wrong with the last verdicts; empty if nothing is wrong or there are too few to say."""
    last = recent(db, COLLAPSE_WINDOW)
    if len(last) < COLLAPSE_WINDOW:
        return ""
    abstentions = Counter(verdict.reason for verdict in last if verdict.score is None and not verdict.hints)
    if abstentions.total() >= MAX_ABSTENTIONS * len(last):
        reason, _count = abstentions.most_common(1)[0]
        return (
            f"The judge abstained on {abstentions.total()} of the last {len(last)} turns, mostly because: "
            f"{reason or 'there was no hint'}. {ADVICE} A language model (--judge-base-url) sees more than rules."
        )
    (score, count), *_ = Counter(verdict.score for verdict in last).most_common()
    if score is not None and count == len(last):
        return (
            f"The last {count} verdicts are all {score:+g}, so there is no difference to learn from. "
            f"{ADVICE} A rubric (--judge-rubric), more votes (--prm-m) or another judge may tell turns apart."
        )
    return ""


def _summary(row: sqlite3.Row) -> VerdictSummary:
    return VerdictSummary(row["score"], Sign(row["sign"]), _source(row), row["hints"], row["reason"])


def _source(row: sqlite3.Row) -> Source | None:
    return known(Source, row["source"], None)


def counts(db: sqlite3.Connection) -> list[VerdictCounts]:
    """Verdicts by source and sign, the source with most verdicts first."""
    rows = db.execute(
        f"SELECT source, sign, count(*) AS verdicts, sum(hints > 0) AS hinted FROM ({SUMMARIES}) GROUP BY source, sign"
    )
    signs: dict[Source | None, Counter[Sign]] = defaultdict(Counter)
    hinted: Counter[Source | None] = Counter()
    for row in rows:
        signs[_source(row)][Sign(row["sign"])] = row["verdicts"]
        hinted[_source(row)] += row["hinted"]
    by_source = [
        VerdictCounts(source, {sign: of[sign] for sign in Sign}, hinted[source]) for source, of in signs.items()
    ]
    return sorted(by_source, key=lambda counts: -counts.total)


class ExampleKind(StrEnum):
    """What makes a judged turn worth showing."""

    HINTED = "hinted"
    """It is trained on with a hint."""
    BEST = "best"
    WORST = "worst"
    ABSTAINED = "abstained"
    """No judge gave a score or a hint."""
    QUARANTINED = "quarantined"
    """Its training step was refused."""


#: How to find the turns of each kind: a condition and an order.
EXAMPLES = {
    ExampleKind.HINTED: ("v.sample IN ('opd', 'opd+rl')", "v.number DESC"),
    ExampleKind.BEST: ("v.score > 0", "v.score DESC, v.number DESC"),
    ExampleKind.WORST: ("v.score < 0", "v.score, v.number DESC"),
    ExampleKind.ABSTAINED: ("v.score IS NULL AND v.sample IS NULL", "v.number DESC"),
    ExampleKind.QUARANTINED: (f"t.reason LIKE '{QUARANTINED}%'", "v.number DESC"),
}


def examples(db: sqlite3.Connection, each: int) -> list[tuple[ExampleKind, int]]:
    """At most `each` turns of each kind, the clearest or newest; a turn has the first kind that fits it."""
    chosen: dict[int, ExampleKind] = {}
    for kind, (condition, order) in EXAMPLES.items():
        rows = db.execute(
            "SELECT v.turn FROM verdicts v JOIN turns t ON t.number = v.turn "
            f"WHERE {condition} AND v.source IS NOT '{Source.PRACTICE}' ORDER BY {order} LIMIT ?",
            (each + len(chosen),),
        )
        new = [row["turn"] for row in rows if row["turn"] not in chosen]
        chosen |= dict.fromkeys(new[:each], kind)
    return [(kind, turn) for turn, kind in chosen.items()]


#: Sessions that have ended, whose turns are all scored and judged, and that have not been settled since.
ENDED = (
    "SELECT number, EXISTS (SELECT 1 FROM episodes e WHERE e.session = s.number) AS is_episode "
    "FROM sessions s WHERE closed IS NOT NULL AND NOT settled AND NOT EXISTS "
    f"(SELECT 1 FROM turns t WHERE t.session = s.number AND t.state IN ('{State.CAPTURED}', '{State.READY}'))"
)


def any_unsettled(db: sqlite3.Connection) -> bool:
    return db.execute(f"{ENDED} LIMIT 1").fetchone() is not None


def settle_sessions(db: sqlite3.Connection, at_least_one: bool) -> list[int]:
    """Settle the sessions that have ended and been judged; the turns that were chosen.

    With `at_least_one`, the best turn of a session without a good one then counts as +1. The turns of episodes are
    left alone.
    """
    ended = db.execute(ENDED).fetchall()
    chosen = [_choose(db, row["number"]) for row in ended if not row["is_episode"]] if at_least_one else []
    db.executemany("UPDATE sessions SET settled = 1 WHERE number = ?", [(row["number"],) for row in ended])
    return [turn for turn in chosen if turn is not None]


def _choose(db: sqlite3.Connection, session: int) -> int | None:
    """Raise the best turn of a session to +1, unless it has a good one; among equals the last that can be raised.

    If no best turn can be raised, none is: a worse turn must not be rewarded in its place.
    """
    rows = db.execute(
        "SELECT t.number, t.state, t.reason, t.next_state, t.prompt_length, v.source "
        "FROM turns t JOIN verdicts v ON v.turn = t.number WHERE t.session = ? AND v.score IS NOT NULL",
        (session,),
    ).fetchall()
    try:
        verdicts = {row["number"]: stored[0] for row in rows if (stored := load(db, row["number"]))}
    except DamagedTurn:
        # It may have been the best one.
        return None
    if not rows or any((verdict.score or 0.0) > 0 for verdict in verdicts.values()):
        return None
    best = max(rows, key=lambda row: (_merit(verdicts[row["number"]]), _is_free(row), row["number"]))
    if not _is_free(best):
        return None
    turn = int(best["number"])
    store(db, turn, replace(verdicts[turn], score=1.0, reason=AT_LEAST_ONE), SampleKind.RL)
    if best["state"] == State.DROPPED:
        move(db, turn, State.READY)
        move(db, turn, State.JUDGED)
    return turn


def _is_free(row: sqlite3.Row) -> bool:
    """Whether a turn can be raised: it has tokens and no explicit score, and no step has used or refused it."""
    explicit = row["source"] in (Source.EXPLICIT, Source.ENVIRONMENT)
    used = row["state"] not in (State.JUDGED, State.DROPPED) or row["reason"].startswith(QUARANTINED)
    return row["next_state"] is not None and not explicit and not used and row["prompt_length"] > 0


def _merit(verdict: Verdict) -> float:
    """The mean of the valid votes, or the score where there was no vote."""
    votes = _valid(verdict.votes)
    return fmean(votes) if votes else verdict.score or 0.0


def _valid(votes: Sequence[Vote]) -> list[float]:
    return [vote.value for vote in votes if vote.question is Question.SCORE and vote.value is not None]

"""Where a run stands, and why nothing has been trained yet."""

import sqlite3
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.ledger import verdicts
from openclaw_rl.ledger.queries import Counts, counts
from openclaw_rl.ledger.states import State

#: So many verdicts are looked at together, and so large a share of abstentions is too large.
COLLAPSE_WINDOW = 50
MOST_ABSTAIN = 0.8
ADVICE = "Look at some of them (openclaw-rl sessions ID): does what came next say anything, and does the judge see it?"


def judging_trouble(recent: Sequence[verdicts.Outcome]) -> str:
    """What is wrong with the last verdicts; empty if nothing is, or if they are too few to say."""
    if len(recent) < COLLAPSE_WINDOW:
        return ""
    silent = Counter(outcome.reason for outcome in recent if outcome.score is None and not outcome.hints)
    if silent.total() >= MOST_ABSTAIN * len(recent):
        reason, _count = silent.most_common(1)[0]
        return (
            f"To {silent.total()} of the last {len(recent)} turns the judge had nothing to say, mostly because: "
            f"{reason or 'there was no hint'}. {ADVICE} A language model (--judge-base-url) sees more than rules."
        )
    (score, count), *_ = Counter(outcome.score for outcome in recent).most_common()
    if score is not None and count == len(recent):
        return (
            f"The last {count} verdicts are all {score:+g}, so there is nothing to learn from a difference. "
            f"{ADVICE} A rubric (--judge-rubric), more votes (--prm-m) or another judge may tell turns apart."
        )
    return ""


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to "how is it going?"."""

    counts: Counts
    server: str | None
    """Where the run's server is reached, if it runs."""
    suspended: str | None
    """Why turns are not recorded at the moment, if so."""
    judge_down: str | None = None
    """Why turns wait for their judge, if they do."""
    trouble: str = ""
    """What is wrong with the last verdicts."""
    quarantined: list[str] = field(default_factory=list)

    @property
    def why_no_update(self) -> str:
        """One sentence: what the next training step is waiting for."""
        states = self.counts.states
        if self.suspended:
            return f"Turns are not being recorded at the moment: {self.suspended}."
        if not self.counts.total:
            where = f" Talk to {self.server}/v1." if self.server else " Start the server and talk to it."
            return "No turn has been recorded yet." + where
        if states[State.READY]:
            waiting = plural(states[State.READY], "turn waits", "turns wait")
            if self.judge_down:
                return f"{waiting} for the judge, which cannot be asked: {self.judge_down}."
            return f"{waiting} to be judged" + ("." if self.server else ", which the server does while it runs.")
        if states[State.AWAITING]:
            return (
                f"{plural(states[State.AWAITING], 'turn waits', 'turns wait')} for what comes next: the next "
                "message of the same session, or POST /v1/feedback."
            )
        if states[State.CAPTURED]:
            return (
                f"{plural(states[State.CAPTURED], 'imported turn waits', 'imported turns wait')} to be scored by "
                "the policy."
            )
        if under_way := states[State.JUDGED] + states[State.BATCHED]:
            return f"{plural(under_way, 'judged turn waits', 'judged turns wait')} for a training step."
        if states[State.APPLIED]:
            return "Every turn that could be trained on has been."
        reasons = ", ".join(f"{count} × {reason}" for reason, count in list(self.counts.dropped.items())[:3])
        return f"No recorded turn can be trained on: {reasons}."

    def as_json(self) -> dict[str, Any]:
        return {
            "turns": {str(state): count for state, count in self.counts.states.items()},
            "dropped": self.counts.dropped,
            "step": self.counts.step,
            "policy_version": self.counts.version,
            "why_no_update": self.why_no_update,
            "suspended": self.suspended,
            "judge_down": self.judge_down,
            "judging_trouble": self.trouble,
            "quarantined": self.quarantined,
            "server": self.server,
        }


def read_status(
    db: sqlite3.Connection | None, server: str | None, suspended: str | None, judge_down: str | None = None
) -> Status:
    """The status of a run from its ledger, which may not exist yet, and from what its server says."""
    if db is None:
        return Status(Counts(dict.fromkeys(State, 0), {}, 0, 0), server, suspended, judge_down)
    trouble = judging_trouble(verdicts.recent(db, COLLAPSE_WINDOW))
    return Status(counts(db), server, suspended, judge_down, trouble)


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"

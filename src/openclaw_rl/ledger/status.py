"""Where a run stands, and why nothing has been trained yet."""

import sqlite3
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.ledger.queries import Counts, counts
from openclaw_rl.ledger.states import State


@dataclass(frozen=True, slots=True)
class Status:
    """The answer to "how is it going?"."""

    counts: Counts
    server: str | None
    """Where the run's server is reached, if it runs."""
    suspended: str | None
    """Why turns are not recorded at the moment, if so."""
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
            return (
                f"{plural(states[State.READY], 'turn is', 'turns are')} ready, and this version does not judge "
                "turns yet."
            )
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
            "quarantined": self.quarantined,
            "server": self.server,
        }


def read_status(db: sqlite3.Connection | None, server: str | None, suspended: str | None) -> Status:
    """The status of a run from its ledger, which may not exist yet."""
    empty = Counts(dict.fromkeys(State, 0), {}, 0, 0)
    return Status(counts(db) if db is not None else empty, server, suspended)


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"

"""Where a run stands, and what the next training step is waiting for."""

import sqlite3
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from openclaw_rl.ledger import groups, notes, practices, training, verdicts
from openclaw_rl.ledger.episodes import groups_waiting
from openclaw_rl.ledger.packing import unpack_messages
from openclaw_rl.ledger.turns import counts
from openclaw_rl.rendering.clients import message_words
from openclaw_rl.terminal import plural
from openclaw_rl.types import (
    BASE_VERSION,
    UNREAD,
    Counts,
    GroupProgress,
    NoteState,
    Practice,
    Source,
    State,
    StepOutcome,
    Update,
)

#: A part of the server that does not work reports this, followed by the reason.
SUSPENDED = "suspended: "
#: So does a learner that is a trainer outside this program.
OUTSIDE = "outside: "
#: What a server does whose model is behind another API, instead of learning.
REMEMBERS = "remembers; the weights are elsewhere"
TEACH_OWN = "'openclaw-rl serve --continue-from RUN_DIR --run-dir NEW' teaches a model of your own."
#: What to say about a part that the server was started without, in the order in which the parts work.
SWITCHED_OFF = {
    "capture": "Nothing is recorded (--no-capture). Start the server without that option, and it learns from the "
    "conversations that follow.",
    "judge": "Nothing is judged (--judge none). Start the server without that option, and it judges the waiting turns.",
    "learner": "Nothing is trained (--max-steps 0). Start the server without that option, and it trains on the waiting "
    "judged turns.",
}
#: Judged turns that are looked at, the newest first.
_TURNS = 100
#: A person's last messages that count, and the fewest that say anything about how that person is understood.
_WINDOW, _LEAST = 20, 6
#: A larger share of messages that were not understood is reported.
_MOST_UNREAD = 0.5
_EXAMPLES = 2
#: Characters of an example.
_MAX_CHARACTERS = 60
#: Plain questions are no feedback, so the rules need not understand them.
_QUESTION_MARKS = ("?", "\uff1f")
#: Verdicts of these sources do not depend on what the next message says.
_OTHER_SOURCES = (Source.ENVIRONMENT, Source.EXPLICIT)


@dataclass(frozen=True, slots=True)
class Status:
    """Where a run stands."""

    counts: Counts
    server: str | None
    """Where the run's server is reached, if it runs."""
    suspended: str | None
    """Why turns are not recorded at the moment, if so."""
    silent: str = ""
    """Why the running server said nothing about itself, so that all is from the ledger."""
    switched_off: str = ""
    """What the running server was started without, if that keeps it from learning."""
    judge_down: str | None = None
    """Why turns wait for their judge, if they do."""
    learner: str = ""
    """What the next training step waits for, as the running server reports it."""
    guard: Mapping[str, Any] = field(default_factory=dict)
    """What the guard of answers found last; empty if nothing."""
    runs: Mapping[str, str] = field(default_factory=dict)
    """Where each part of the running server runs."""
    trouble: str = ""
    """What is wrong with the last verdicts."""
    unread: str = ""
    """That the rules do not understand most of what somebody says, with examples."""
    quarantined: list[Update] = field(default_factory=list)
    serving: int | None = None
    """The policy version that the running server serves: after a rollback it is not the last step's."""
    saved: int = BASE_VERSION
    """The newest checkpoint's policy version, which the ledger does not know after a rollback."""
    held: int = 0
    """Turns of episodes without a reward; they are among those that await a next state."""
    groups: list[GroupProgress] = field(default_factory=list)
    """The groups that wait for attempts."""
    notes: Mapping[NoteState, int] = field(default_factory=dict)
    """How many notes of all users are in each state; removed ones are left out."""
    practice: Practice | None = None
    """What is practised now, or first of what waits."""
    lines: Sequence[Mapping[str, Any]] = ()
    """Where each line of policies stands, as the running server reports it; empty if there is only the shared one."""

    @property
    def version(self) -> int:
        return max(self.counts.version, self.saved) if self.serving is None else self.serving

    @property
    def waiting_for(self) -> str:
        """What the next training step is waiting for: one sentence, and one about groups that are not complete."""
        return " ".join(filter(None, (self._next_step, groups_waiting(self.groups))))

    @property
    def _next_step(self) -> str:
        states = self.counts.states
        if self.suspended:
            return f"Turns are not being recorded at the moment: {self.suspended}."
        if self.switched_off:
            return self.switched_off
        if self.learner == REMEMBERS:
            return f"This server {REMEMBERS}. {TEACH_OWN}"
        if not self.counts.total:
            where = f" Talk to {self.server}/v1." if self.server else " Start the server and talk to it."
            return "No turn has been recorded yet." + where
        if self.learner.startswith((SUSPENDED, "training ", "done: ")):
            return f"The learner: {self.learner.removeprefix(SUSPENDED)}."
        if states[State.READY]:
            waiting = plural(states[State.READY], "turn waits", "turns wait")
            if self.judge_down:
                return f"{waiting} for the judge, which cannot be asked: {self.judge_down}."
            return f"{waiting} to be judged" + ("." if self.server else ", which the server does while it runs.")
        if states[State.JUDGED] + states[State.BATCHED] and self.learner.startswith(OUTSIDE):
            return f"The trainer is outside: {self.learner.removeprefix(OUTSIDE)}."
        if states[State.JUDGED] and self.learner:
            preparing = self.learner.startswith("preparing: ")
            return f"The learner: {self.learner}." if preparing else f"{self.learner.capitalize()} so far."
        under_way = states[State.JUDGED] + states[State.BATCHED]
        if under_way and not self.server:
            return (
                f"The server is not running. {plural(under_way, 'judged turn waits', 'judged turns wait')} for it: "
                "once it is started, it trains as soon as there are enough of them for a step."
            )
        if states[State.AWAITING] > self.held:
            return (
                f"{plural(states[State.AWAITING] - self.held, 'turn waits', 'turns wait')} for what comes next: the "
                "next message of the same session, or POST /v1/feedback."
            )
        if self.held:
            return (
                f"{plural(self.held, 'turn waits', 'turns wait')} for the reward of an episode: "
                "POST /v1/sessions/ID/reward."
            )
        if states[State.CAPTURED]:
            return (
                f"{plural(states[State.CAPTURED], 'imported turn waits', 'imported turns wait')} to be scored by "
                "the policy."
            )
        if under_way:
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
            "policy_version": self.version,
            "waiting_for": self.waiting_for,
            "suspended": self.suspended,
            "judge_down": self.judge_down,
            "judging_trouble": self.trouble,
            "not_understood": self.unread,
            "learner": self.learner,
            "guard": dict(self.guard),
            "runs": dict(self.runs),
            "held": self.held,
            "notes": {str(state): count for state, count in self.notes.items()},
            "practice": self.practice and asdict(self.practice),
            "groups_waiting": [asdict(group) for group in self.groups],
            "quarantined": [
                {"step": batch.step, "turns": batch.turns, "reason": batch.reason, "created": batch.created}
                for batch in self.quarantined
            ],
            **({"lines": list(self.lines)} if self.lines else {}),
            "server": self.server,
            "server_silent": self.silent,
        }


def read_status(
    db: sqlite3.Connection | None,
    server: str | None,
    ready: Mapping[str, Any],
    saved: int = BASE_VERSION,
    guard: Mapping[str, Any] | None = None,
) -> Status:
    """The status of a run.

    `db` is its ledger, if there is one yet; `ready` is its server's answer to `/readyz`, empty if none runs; `saved` is
    the policy version of the newest checkpoint; `guard` is what the guard left in the run directory.
    """
    nothing = Counts(dict.fromkeys(State, 0), {}, 0, 0)
    return Status(
        counts(db) if db else nothing,
        server,
        suspended=why(ready, "capture"),
        silent=why_silent(ready) if server else "",
        switched_off=next((says for part, says in SWITCHED_OFF.items() if ready.get(part) == "off"), ""),
        judge_down=why(ready, "judge"),
        learner=ready.get("learner", ""),
        guard=ready.get("guard", guard) or {},
        runs={part: where for part, where in ready.get("runs", {}).items() if where},
        trouble=verdicts.judging_trouble(db) if db else "",
        unread=words_not_understood(db) if db else "",
        quarantined=[step for step in training.load_steps(db) if is_set_aside(step)][::-1] if db else [],
        serving=ready.get("policy_version"),
        saved=saved,
        held=groups.queue(db).held if db else 0,
        groups=groups.waiting(db) if db else [],
        notes=notes.count(db) if db else {},
        practice=practices.current(db) if db else None,
        lines=ready.get("lines", ()),
    )


def is_set_aside(step: Update) -> bool:
    """Whether a step was refused, or rolled back by the guard."""
    return step.outcome is StepOutcome.QUARANTINED or (step.outcome is StepOutcome.ROLLED_BACK and bool(step.reason))


def words_not_understood(db: sqlite3.Connection, *, quotes: bool = True) -> str:
    """A sentence if the rules did not understand most of what somebody said; otherwise empty.

    It has examples only if it `quotes`: a log keeps what `forget` deletes.
    """
    messages: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    rows = db.execute(
        "SELECT s.owner, t.next_state, (v.score IS NULL AND instr(v.reason, ?)) AS unread "
        "FROM verdicts v JOIN turns t ON t.number = v.turn "
        "JOIN sessions s ON s.number = t.session WHERE v.source IS NOT ? AND v.source IS NOT ? "
        "AND t.next_state IS NOT NULL ORDER BY v.number DESC LIMIT ?",
        (UNREAD, *_OTHER_SOURCES, _TURNS),
    )
    for row in rows:
        try:
            said = words_of(row["next_state"])
        except (ValueError, TypeError, RecursionError):
            continue  # it is damaged
        if said and not said.endswith(_QUESTION_MARKS):
            messages[row["owner"]].append((said, bool(row["unread"])))
    for owner, all_said in messages.items():
        last = all_said[:_WINDOW]
        unread = [said for said, not_understood in last if not_understood]
        if len(last) >= _LEAST and len(unread) > _MOST_UNREAD * len(last):
            who = f" of {owner}" if owner and len(messages) > 1 else ""
            some = " and ".join(f'"{shorten(said)}"' for said in list(dict.fromkeys(unread))[:_EXAMPLES])
            shown = f", for example {some}" if quotes else " (openclaw-rl status quotes some)"
            return (
                f"The rules did not understand {len(unread)} of the last {len(last)} messages{who} that are no "
                f'questions{shown}. Say plainly what you want of answers ("shorter, please"), give '
                "feedback (POST /v1/feedback), or let a language model judge (--judge-base-url)."
            )
    return ""


def words_of(next_state: str) -> str:
    """What the user wrote in the messages that came next."""
    texts = (message_words(message) for message in unpack_messages(next_state) or () if message.get("role") == "user")
    return " ".join(" ".join(texts).split())


def shorten(said: str) -> str:
    return said if len(said) <= _MAX_CHARACTERS else f"{said[: _MAX_CHARACTERS - 1].rstrip()}…"


def why_silent(ready: Mapping[str, Any]) -> str:
    """Why an answer to `/readyz` says nothing about the server's parts; empty if it does."""
    if "capture" in ready:
        return ""
    return "the server shows its state only with its key" if ready else "the server does not answer"


def why(ready: Mapping[str, str], part: str) -> str | None:
    """Why a part of the server does not work at the moment, if so."""
    status = str(ready.get(part, ""))
    return status.removeprefix(SUSPENDED) if status.startswith(SUSPENDED) else None

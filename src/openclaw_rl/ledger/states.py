"""The states of a turn, the allowed transitions between them, and why turns are dropped."""

import sqlite3
import time

from openclaw_rl.ledger.errors import LedgerError, UnknownTurn
from openclaw_rl.types import State

#: Explicit feedback brings a turn back to READY, also one that was given up for lack of a next state.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.CAPTURED: frozenset({State.AWAITING, State.READY, State.DROPPED}),
    State.AWAITING: frozenset({State.READY, State.DROPPED}),
    # A session whose turns were ready or judged can become an episode, whose reward they then await.
    State.READY: frozenset({State.AWAITING, State.JUDGED, State.DROPPED}),
    State.JUDGED: frozenset({State.AWAITING, State.BATCHED, State.READY, State.DROPPED}),
    State.BATCHED: frozenset({State.APPLIED, State.JUDGED, State.DROPPED}),
    # A step that was lost with the learner's memory is made again. In another epoch an imported turn is scored again.
    State.APPLIED: frozenset({State.JUDGED, State.CAPTURED}),
    State.DROPPED: frozenset({State.READY}),
}
#: Reasons that are used in more than one place.
SUPERSEDED = "superseded: the client asked again"
NO_NEXT_STATE = "the session ended without a next state"
EPISODE_ENDED = "answered after the end of its episode"
#: Begins the reason of a turn whose training step was refused.
QUARANTINED = "quarantined: "
ALREADY_USED = (State.BATCHED, State.APPLIED)


class IllegalTransition(LedgerError):
    """A turn cannot move from its state to the requested one."""

    def __init__(self, turn: int, current: State, wanted: State) -> None:
        super().__init__(f"turn {turn} is {current} and cannot become {wanted}")
        self.current, self.wanted = current, wanted


def move(db: sqlite3.Connection, turn: int, state: State, reason: str = "") -> None:
    """Change a turn's state. Raises IllegalTransition and UnknownTurn."""
    row = db.execute("SELECT state FROM turns WHERE number = ?", (turn,)).fetchone()
    if row is None:
        raise UnknownTurn(f"there is no turn {turn}")
    current = State(row["state"])
    if state not in TRANSITIONS[current]:
        raise IllegalTransition(turn, current, state)
    ready = time.time() if state is State.READY else None
    db.execute(
        "UPDATE turns SET state = ?, reason = ?, ready_at = coalesce(?, ready_at) WHERE number = ?",
        (state, reason, ready, turn),
    )

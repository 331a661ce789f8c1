"""The states of a turn, and the allowed transitions between them."""

from openclaw_rl.ledger.errors import LedgerError
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


class IllegalTransition(LedgerError):
    """A turn cannot move from its state to the requested one."""

    def __init__(self, turn: int, current: State, wanted: State) -> None:
        super().__init__(f"turn {turn} is {current} and cannot become {wanted}")
        self.current, self.wanted = current, wanted

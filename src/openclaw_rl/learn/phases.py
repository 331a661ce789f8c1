"""The phases of the learning loop, and the allowed transitions between them."""

from enum import StrEnum


class Phase(StrEnum):
    """What the learning loop does, and what the learner holds meanwhile."""

    UNPREPARED = "unprepared"
    """The learner may hold anything: it has just started, was lost, or a rollback failed."""
    WAITING = "waiting"
    """The learner holds the last step that counts. The loop waits for judged turns."""
    BATCHING = "batching"
    """Turns are claimed. The learner still holds the last step that counts."""
    TRAINING = "training"
    """The learner holds, or is making, a step that does not count yet."""
    SAVING = "saving"
    """The last step counts. It is reported, and a checkpoint is written when one is due."""
    SUSPENDED = "suspended"
    """An error stopped the last attempt. The learner holds the last step that counts, and the loop tries again."""
    ROLLING_BACK = "rolling back"
    """The learner loads an earlier policy."""


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.UNPREPARED: frozenset({Phase.WAITING, Phase.ROLLING_BACK}),
    # WAITING and SUSPENDED lead to SAVING when the server stops.
    Phase.WAITING: frozenset({Phase.BATCHING, Phase.SAVING, Phase.SUSPENDED, Phase.ROLLING_BACK}),
    Phase.SUSPENDED: frozenset({Phase.WAITING, Phase.SAVING, Phase.ROLLING_BACK}),
    Phase.BATCHING: frozenset({Phase.TRAINING, Phase.WAITING}),
    # A step that was refused or taken back leads to BATCHING, because its turns are still claimed.
    Phase.TRAINING: frozenset({Phase.BATCHING, Phase.SAVING, Phase.UNPREPARED}),
    Phase.SAVING: frozenset({Phase.WAITING, Phase.UNPREPARED}),
    Phase.ROLLING_BACK: frozenset({Phase.WAITING, Phase.UNPREPARED}),
}


class IllegalPhase(RuntimeError):
    """The loop was asked to enter a phase that its current phase does not lead to."""


class Phases:
    """The current phase of a loop. `enter` raises IllegalPhase for a transition that is not in the table."""

    def __init__(self) -> None:
        self.current = Phase.UNPREPARED

    def enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.current]:
            raise IllegalPhase(f"learning is {self.current} and cannot become {phase}")
        self.current = phase

"""How judging fails: the judge is down, or it cannot judge this turn."""

#: The reason when a judge that did not answer in time gave no other.
TIMED_OUT = "the judge does not answer in time"


class JudgeError(Exception):
    """There is no verdict this time; the message says why."""


class JudgeDown(JudgeError):
    """The judge cannot be asked at the moment. The turn waits.

    `suspect`: the judge failed while it worked on this turn. If it answers other turns meanwhile, the turn is blamed.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, *, suspect: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.suspect = retry_after, suspect


class JudgeFailed(JudgeError):
    """The judge cannot judge this turn. After some trials the turn gets no verdict."""

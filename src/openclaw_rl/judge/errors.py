"""How judging fails: because the judge is away, or because of the turn."""


class JudgeError(Exception):
    """No verdict this time; the message says why."""


class JudgeDown(JudgeError):
    """The judge cannot be asked at the moment. It is no fault of the turn, which waits.

    `suspect`: the judge fell while it worked on this turn; if it goes on answering others, it is the turn after all.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, *, suspect: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.suspect = retry_after, suspect


class JudgeFailed(JudgeError):
    """The judge could not deal with this turn; after some trials it abstains."""

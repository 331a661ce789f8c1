"""How judging fails: because the judge is away, or because of the turn."""


class JudgeError(Exception):
    """No verdict this time; the message says why."""


class JudgeDown(JudgeError):
    """The judge cannot be asked at the moment. It is no fault of the turn, which waits."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class JudgeFailed(JudgeError):
    """The judge could not deal with this turn; after some trials it abstains."""

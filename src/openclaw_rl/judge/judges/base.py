"""What a judge is: the protocol, and the opinion it gives."""

from dataclasses import dataclass
from typing import Protocol

from openclaw_rl.judge.case import Case
from openclaw_rl.types import Question, Source, Vote

Questions = frozenset[Question]


@dataclass(frozen=True, slots=True)
class Opinion:
    """One judge's answers to the questions it was asked. None means that it cannot say."""

    score: float | None = None
    hints: tuple[str, ...] | None = None
    """Empty: nothing would have been better."""
    votes: tuple[Vote, ...] = ()
    reason: str = ""
    source: Source | None = None
    """Set where it differs from the judge's own source."""

    def answers(self, question: Question) -> bool:
        return (self.score if question is Question.SCORE else self.hints) is not None


class Judge(Protocol):
    """Answers questions about a case, or abstains with a reason."""

    @property
    def source(self) -> Source: ...

    @property
    def down(self) -> str | None:
        """Why the judge cannot be asked at the moment; None if it can."""

    @property
    def answered(self) -> int:
        """How many calls it has answered; 0 for a judge that is never down."""

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        """Raises JudgeError or TimeoutError if the judge gives no opinion."""

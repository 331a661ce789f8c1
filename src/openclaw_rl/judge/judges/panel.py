"""Several judges as one."""

import time
from collections.abc import Sequence

from openclaw_rl.judge.case import Case
from openclaw_rl.judge.judges.base import Judge, Opinion, Questions
from openclaw_rl.types import Hint, Question, Source, Verdict, Vote


class JudgePanel:
    """Asks judges one after the other, each only the questions that those before it left open."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self.judges = judges

    @property
    def down(self) -> str | None:
        """Why a judge cannot be asked at the moment; None if all can."""
        return next((judge.down for judge in self.judges if judge.down), None)

    @property
    def answered(self) -> int:
        """How many calls the judges that can be down have answered."""
        return sum(judge.answered for judge in self.judges)

    def without_feedback(self) -> "JudgePanel":
        """The same judges, except the one that repeats explicit feedback and rewards."""
        return JudgePanel([judge for judge in self.judges if judge.source is not Source.EXPLICIT])

    async def verdict(self, case: Case, wanted: Questions) -> Verdict:
        started = time.monotonic()
        opinions: dict[Question, tuple[Opinion, Source]] = {}
        votes: list[Vote] = []
        reasons: list[str] = []
        for judge in self.judges:
            still_open = frozenset(question for question in wanted if question not in opinions)
            if not still_open:
                break
            opinion = await judge.judge(case, still_open)
            votes += opinion.votes
            if opinion.reason:
                reasons.append(f"{judge.source}: {opinion.reason}")
            for question in still_open:
                if opinion.answers(question):
                    opinions[question] = (opinion, opinion.source or judge.source)
        score, score_source = opinions.get(Question.SCORE, (Opinion(), None))
        hints, hint_source = opinions.get(Question.HINT, (Opinion(), None))
        return Verdict(
            score=score.score,
            source=score_source or hint_source,
            hints=tuple(Hint(text) for text in hints.hints or ()),
            votes=tuple(votes),
            reason="; ".join(reasons),
            seconds=time.monotonic() - started,
        )

"""Several judges as one, which judges a turn for the first time or again."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from openclaw_rl.errors import UserError
from openclaw_rl.judge.circuit_breaker import FIRST_PAUSE
from openclaw_rl.judge.judges.base import Case, Judge, JudgeDown, JudgeError, Opinion, Questions
from openclaw_rl.types import Hint, Question, Source, StoredTurn, Verdict, Vote

#: How long a judge may be unreachable before judging again gives up.
MAX_SECONDS_DOWN = 20.0


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


@dataclass(frozen=True, slots=True)
class TwoScores:
    """A turn that was judged twice; None is an abstention."""

    turn: int
    stored: float | None
    new: float | None


async def rejudge(panel: JudgePanel, turn: StoredTurn) -> TwoScores:
    """Score a turn without the people's own feedback on it, which the judge is measured by.

    Raises UserError if the judge stays unreachable: its abstentions would say nothing about it.
    """
    stored = turn.verdict.score if turn.verdict else None
    patience = MAX_SECONDS_DOWN
    while True:
        try:
            verdict = await panel.verdict(replace(Case.of(turn), feedback=()), frozenset([Question.SCORE]))
            return TwoScores(turn.number, stored, verdict.score)
        except JudgeDown as error:
            if patience <= 0:
                raise UserError(f"The judge cannot be asked: {error}.") from None
            pause = max(FIRST_PAUSE, error.retry_after)
            patience -= pause
            await asyncio.sleep(pause)
        except (JudgeError, TimeoutError):
            return TwoScores(turn.number, stored, None)

"""Judging a stored turn again, to compare the new score with the stored one."""

import asyncio
from dataclasses import dataclass, replace

from openclaw_rl.errors import UserError
from openclaw_rl.judge.case import Case
from openclaw_rl.judge.circuit_breaker import FIRST_PAUSE
from openclaw_rl.judge.errors import JudgeDown, JudgeError
from openclaw_rl.judge.judges.panel import JudgePanel
from openclaw_rl.types import Question, StoredTurn

#: How long a judge may be unreachable before judging again gives up.
MAX_SECONDS_DOWN = 20.0


@dataclass(frozen=True, slots=True)
class TwoScores:
    """A turn that was judged twice; None is an abstention."""

    turn: int
    stored: float | None
    again: float | None


async def judge_again(panel: JudgePanel, turn: StoredTurn) -> TwoScores:
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

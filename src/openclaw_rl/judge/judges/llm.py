"""The judge that asks a language model."""

import asyncio

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.judge import prompts
from openclaw_rl.judge.askers import Asker, AskParams
from openclaw_rl.judge.case import Case
from openclaw_rl.judge.circuit_breaker import Breaker
from openclaw_rl.judge.judges.base import Opinion, Questions
from openclaw_rl.judge.votes import accepted_hints, parse, tally
from openclaw_rl.types import Question, Source, Vote


class LlmJudge:
    """Asks a language model each question several times and counts its votes."""

    source = Source.LLM

    def __init__(
        self,
        asker: Asker,
        params: AskParams,
        *,
        threshold: float = 0.0,
        rubric: str = "",
        timeout: float,
        seed: int = 0,
    ) -> None:
        self.asker, self.params, self.threshold = asker, params, threshold
        self.rubric, self.timeout, self.seed = rubric, timeout, seed
        self.breaker = Breaker()

    @property
    def down(self) -> str | None:
        return self.breaker.reason

    @property
    def answered(self) -> int:
        return self.breaker.answered

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        order = [question for question in Question if question in wanted]
        # All questions are one call of the breaker, so that a trial call covers a whole turn.
        answers = await self.breaker.call(lambda: gather_or_cancel([self._ask(case, question) for question in order]))
        votes = dict(zip(order, answers, strict=True))
        score = tally(votes[Question.SCORE], self.threshold) if Question.SCORE in votes else None
        hints = accepted_hints(votes[Question.HINT]) if Question.HINT in votes else None
        invalid = [f"no vote on the {q} can be read" for q in order if all(v.value is None for v in votes[q])]
        return Opinion(score, hints, tuple(vote for some in answers for vote in some), "; ".join(invalid))

    async def _ask(self, case: Case, question: Question) -> list[Vote]:
        chat = prompts.messages(case, question, self.rubric)
        async with asyncio.timeout(self.timeout):
            answers = await self.asker.ask(chat, self.params, self.seed + case.turn)
        return [parse(question, a.text, a.seconds, a.tokens, cut_off=a.cut_off) for a in answers]

"""Those who judge: explicit words, the reader of feedback, a language model. `Panel` asks them in turn."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from openclaw_rl.judge import prompts
from openclaw_rl.judge.askers import Asker, AskParams
from openclaw_rl.judge.case import Case
from openclaw_rl.judge.circuit_breaker import Breaker
from openclaw_rl.judge.errors import JudgeFailed
from openclaw_rl.judge.reader import ReplyKind, instruct, read_reply
from openclaw_rl.judge.votes import MIN_HINT, accepted_hints, parse, tally
from openclaw_rl.types import Hint, Question, Source, Verdict, Vote

Questions = frozenset[Question]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opinion:
    """What one judge says to the questions it was asked. None: it cannot say."""

    score: float | None = None
    hints: tuple[str, ...] | None = None
    """Empty: there is nothing that would have been better."""
    votes: tuple[Vote, ...] = ()
    reason: str = ""
    source: Source | None = None
    """Set where it is not always the judge's own."""

    def answers(self, question: Question) -> bool:
        return (self.score if question is Question.SCORE else self.hints) is not None


class Judge(Protocol):
    """Answers questions about a case, or abstains with a reason. Raises JudgeError if it could not be asked."""

    @property
    def source(self) -> Source: ...
    async def judge(self, case: Case, wanted: Questions) -> Opinion: ...


class Explicit:
    """What somebody said of this very turn; the last word counts."""

    source = Source.EXPLICIT

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.feedback:
            return Opinion()
        last = case.feedback[-1]
        hints: tuple[str, ...] | None = () if last.score > 0 else None
        if hints is None and last.source is Source.EXPLICIT:
            hint = instruct(" ".join(last.text.split()), case.response)
            hints = (hint,) if len(hint) > MIN_HINT else None
        return Opinion(last.score, hints, source=last.source)


#: What the kinds of replies say about the response before them. A rejection leaves open what would be better.
READINGS: dict[ReplyKind, float] = {
    ReplyKind.ACKNOWLEDGEMENT: 1.0,
    ReplyKind.MOVING_ON: 1.0,
    ReplyKind.TOOL_SUCCESS: 1.0,
    ReplyKind.CORRECTION: -1.0,
    ReplyKind.CHANGE_REQUEST: -1.0,
    ReplyKind.REJECTION: -1.0,
    ReplyKind.REPETITION: -1.0,
    ReplyKind.TOOL_ERROR: -1.0,
}


#: Kinds of replies whose hints may be wishes about form. A tool's message may sound like one, and is none.
ABOUT_FORM = (ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION)


class FeedbackReader:
    """Reads the next state by rules."""

    source = Source.FEEDBACK

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        if not case.next_state:
            return Opinion(reason="nothing came next")
        reading = read_reply(case.request, case.response, case.next_state)
        score = READINGS.get(reading.kind)
        if score is None:
            return Opinion(reason="what came next is unclear")
        hint = instruct(reading.hint, case.response) if reading.kind in ABOUT_FORM else reading.hint
        hints = (hint,) if len(hint) > MIN_HINT else () if score > 0 else None
        return Opinion(score, hints, reason=str(reading.kind))


class LlmJudge:
    """Puts the questions to a language model and counts its votes."""

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

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        order = [question for question in Question if question in wanted]
        # One call of the breaker: a trial of a judge that was down is a turn with all its questions.
        answers = await self.breaker.call(lambda: together([self._ask(case, question) for question in order]))
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


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give; when one fails, the others end too."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Panel:
    """Asks judges one after the other, each only for what those before it left open."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self.judges = judges

    async def verdict(self, case: Case, wanted: Questions) -> Verdict:
        started = time.monotonic()
        opinions: dict[Question, tuple[Opinion, Source]] = {}
        votes: list[Vote] = []
        reasons: list[str] = []
        for judge in self.judges:
            still = frozenset(question for question in wanted if question not in opinions)
            if not still:
                break
            opinion = await judge.judge(case, still)
            votes += opinion.votes
            if opinion.reason:
                reasons.append(f"{judge.source}: {opinion.reason}")
            for question in still:
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


def checked_score(value: object, who: str) -> float:
    """A score from somebody else's code. Raises JudgeFailed if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
        raise JudgeFailed(f"{who} gave {value!r}, which is no number from -1 to 1")
    return float(value)

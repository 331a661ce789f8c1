"""How well a policy pleases a persona on questions it was never asked: the rules and the guard, on each answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.evals.quality import check
from openclaw_rl.evals.questions import EvalQuestion
from openclaw_rl.evals.scores import side_by_side

#: Asked at the same time: enough to fill a batch on a laptop.
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class ExamAnswer:
    """A held-out question, its answer, and what was found."""

    question: EvalQuestion
    answer: str
    keeps_rules: bool
    faults: tuple[str, ...]
    """Why it is no good answer, whatever the rules say."""

    @property
    def passed(self) -> bool:
        return self.keeps_rules and not self.faults


async def examine(
    chat: Chat,
    persona: Persona,
    questions: Sequence[EvalQuestion],
    *,
    max_tokens: int,
    seed: int,
    on_answer: Callable[[ExamAnswer], None] | None = None,
) -> tuple[ExamAnswer, ...]:
    """Ask each question once, without a trace in the record. Raises ChatFailed."""

    async def one(numbered: tuple[int, EvalQuestion]) -> ExamAnswer:
        number, question = numbered
        message = {"role": "user", "content": question.text}
        reply = await chat.ask([message], max_tokens=max_tokens, seed=seed + number, keep=False)
        found = judge(persona, question, reply.text)
        if on_answer is not None:
            on_answer(found)
        return found

    return await side_by_side(list(enumerate(questions)), one, AT_ONCE)


def judge(persona: Persona, question: EvalQuestion, answer: str, perplexity: float | None = None) -> ExamAnswer:
    quality = check(answer, question.text, question.reference, perplexity=perplexity)
    return ExamAnswer(question, answer, not persona.failed(answer), quality.reasons)

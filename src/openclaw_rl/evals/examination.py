"""How well a policy pleases a persona on questions it was never asked: the rules and the guard, on each answer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.evals.quality import check
from openclaw_rl.evals.questions import Question

#: Asked at the same time: enough to fill a batch on a laptop.
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Answered:
    """A held-out question, its answer, and what was found."""

    question: Question
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
    questions: Sequence[Question],
    *,
    max_tokens: int,
    seed: int,
    on_answer: Callable[[Answered], None] | None = None,
) -> tuple[Answered, ...]:
    """Ask each question once, without a trace in the record. Raises ChatFailed."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, question: Question) -> Answered:
        async with places:
            message = {"role": "user", "content": question.text}
            reply = await chat.ask([message], max_tokens=max_tokens, seed=seed + number, keep=False)
        found = judge(persona, question, reply.text)
        if on_answer is not None:
            on_answer(found)
        return found

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(number, question)) for number, question in enumerate(questions)]
    return tuple(task.result() for task in tasks)


def judge(persona: Persona, question: Question, answer: str, perplexity: float | None = None) -> Answered:
    quality = check(answer, question.text, question.reference, perplexity=perplexity)
    return Answered(question, answer, not persona.failed(answer), quality.reasons)

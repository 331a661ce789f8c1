"""Asks a policy held-out questions, and checks each answer with the persona's rules and the quality guard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from openclaw_rl.aio import run_concurrently
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.conversation import EvalQuestion
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.lab.statistics import Marks
from openclaw_rl.sense import check

#: Questions asked at the same time: enough to fill a batch on a laptop.
MAX_CONCURRENT_QUESTIONS = 8


@dataclass(frozen=True, slots=True)
class ExamAnswer:
    """A held-out question, its answer, and the results of the checks."""

    question: EvalQuestion
    answer: str
    keeps_rules: bool
    faults: tuple[str, ...]
    """What the quality guard objects to."""

    @property
    def passed(self) -> bool:
        return self.keeps_rules and not self.faults


async def examine(
    chat: Chat,
    persona: Persona,
    questions: Sequence[EvalQuestion],
    *,
    seed: int,
    max_tokens: int = 0,
    on_answer: Callable[[ExamAnswer], None] | None = None,
    notes: bool = False,
    temperature: float | None = None,
    at_once: int = MAX_CONCURRENT_QUESTIONS,
    headers: Mapping[str, str] | None = None,
) -> tuple[ExamAnswer, ...]:
    """Ask each question once, without the notes of the person unless `notes`. The server records none of it.

    Answers are as long as the persona reads, or have `max_tokens`. Raises ServerError.
    """

    async def one(numbered: tuple[int, EvalQuestion]) -> ExamAnswer:
        number, question = numbered
        message = {"role": "user", "content": question.text}
        reply = await chat.ask(
            [message],
            max_tokens=max_tokens or persona.longest_answer,
            temperature=temperature,
            seed=seed + number,
            keep=False,
            notes=notes,
            headers=headers,
        )
        answer = judge(persona, question, reply.text)
        if on_answer is not None:
            on_answer(answer)
        return answer

    return await run_concurrently(list(enumerate(questions)), one, at_once)


def marks(answers: Sequence[ExamAnswer], is_good: Callable[[ExamAnswer], bool]) -> Marks:
    """The questions of the answers, and whether each is good."""
    return [(answer.question.text, is_good(answer)) for answer in answers]


def is_adherent(answer: ExamAnswer) -> bool:
    return answer.passed


def is_sensible(answer: ExamAnswer) -> bool:
    return not answer.faults


def judge(persona: Persona, question: EvalQuestion, answer: str, perplexity: float | None = None) -> ExamAnswer:
    quality = check(answer, question.text, question.reference, perplexity=perplexity, translated=persona.translated)
    return ExamAnswer(question, answer, not persona.failed(answer), quality.reasons)

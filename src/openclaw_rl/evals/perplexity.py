"""How probable the base model finds answers: the last part of the guard, looked at when a trial is over."""

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.engines.factory import Resources
from openclaw_rl.evals.examination import ExamAnswer, judge
from openclaw_rl.evals.machine import Machine
from openclaw_rl.evals.trial import Exam, TrialOutcome
from openclaw_rl.models import EMBEDDED
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import ScoreRequest

#: Answers scored at the same time, and what their keys and values may take.
AT_ONCE, CACHE_GIB = 8, 1.0


async def add_perplexity(outcomes: Sequence[TrialOutcome], machine: Machine, folder: Path) -> None:
    """Judge every examination's answers again, now with their perplexity under the base weights."""
    settings = machine.settings.for_few_sequences(AT_ONCE, 0, CACHE_GIB)
    async with contextlib.AsyncExitStack() as stack:
        sampler = machine.sampler.open(settings, Resources(stack), folder, machine.model_name or EMBEDDED)
        stack.push_async_callback(sampler.close)
        await sampler.start()
        renderer = await asyncio.to_thread(ChatRenderer, folder)
        places = asyncio.Semaphore(AT_ONCE)

        async def one(outcome: TrialOutcome, answer: ExamAnswer) -> ExamAnswer:
            async with places:
                found = await perplexity(sampler, renderer, answer)
            return judge(outcome.plan.persona, answer.question, answer.answer, found)

        for outcome in outcomes:
            exams: list[Exam] = []
            for exam in outcome.exams:
                answers = await asyncio.gather(*(one(outcome, answer) for answer in exam.answers))
                exams.append(replace(exam, answers=tuple(answers)))
            outcome.exams[:] = exams


async def perplexity(sampler: Sampler, renderer: ChatRenderer, answer: ExamAnswer) -> float | None:
    """Of an answer to its question; None for an empty one, or one that cannot be scored."""
    prompt = renderer.prompt(renderer.text([{"role": "user", "content": answer.question.text}])).ids
    ids = renderer.tokenizer.encode_text(answer.answer)
    if not ids:
        return None
    try:
        scores = await sampler.score(ScoreRequest([*prompt, *ids], len(ids)))
    except EngineError:
        return None
    return math.exp(-sum(scores.logprobs) / len(ids))

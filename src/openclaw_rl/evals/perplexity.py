"""The perplexity of answers under the base model: the last part of the quality guard, added when a trial is over."""

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
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import ScoreRequest

#: Answers scored at the same time, and the size of the cache for their keys and values.
MAX_CONCURRENT_ANSWERS, CACHE_GIB = 8, 1.0


async def add_perplexity(outcomes: Sequence[TrialOutcome], machine: Machine, folder: Path) -> None:
    """Check the answers of all examinations again, now with their perplexity under the base model."""
    settings = machine.settings.for_few_sequences(MAX_CONCURRENT_ANSWERS, 0, CACHE_GIB)
    async with contextlib.AsyncExitStack() as stack:
        sampler = machine.sampler.open(settings, Resources(stack), folder, machine.policy_name)
        stack.push_async_callback(sampler.close)
        await sampler.start()
        renderer = await asyncio.to_thread(ChatRenderer, folder)
        slots = asyncio.Semaphore(MAX_CONCURRENT_ANSWERS)

        async def one(outcome: TrialOutcome, answer: ExamAnswer) -> ExamAnswer:
            async with slots:
                value = await perplexity(sampler, renderer, answer)
            return judge(outcome.plan.persona, answer.question, answer.answer, value)

        async def again(outcome: TrialOutcome, exam: Exam) -> Exam:
            answers = await asyncio.gather(*(one(outcome, answer) for answer in exam.answers))
            return replace(exam, answers=tuple(answers))

        for outcome in outcomes:
            outcome.exams[:] = [await again(outcome, exam) for exam in outcome.exams]
            if outcome.noted is not None:
                outcome.noted = await again(outcome, outcome.noted)


async def perplexity(sampler: Sampler, renderer: ChatRenderer, answer: ExamAnswer) -> float | None:
    """The perplexity of an answer; None if it is empty or cannot be scored."""
    prompt = renderer.prompt(renderer.text([{"role": "user", "content": answer.question.text}])).ids
    ids = renderer.tokenizer.encode_text(answer.answer)
    if not ids:
        return None
    try:
        scores = await sampler.score(ScoreRequest([*prompt, *ids], len(ids)))
    except EngineError:
        return None
    return math.exp(-sum(scores.logprobs) / len(ids))

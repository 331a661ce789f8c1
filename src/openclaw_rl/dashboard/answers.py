"""Greedy answers of the base model and of the newest checkpoint to the same prompts."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.dashboard.run import Prompt, RunSource
from openclaw_rl.engines.base import WeightForm, policy_in
from openclaw_rl.engines.factory import Resources, sampler_that_loads
from openclaw_rl.learn.checkpoints import Checkpoint
from openclaw_rl.learn.gate import answer_greedily
from openclaw_rl.models import adapter_rank
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION

ANSWER_TOKENS = 200
#: A few short sequences need little memory, and a server may be using the same machine.
CACHE_GIB = 0.5


@dataclass(frozen=True, slots=True)
class Compared:
    """Two answers to one prompt."""

    question: str
    before: str
    after: str


async def compare(
    source: RunSource,
    model: str,
    folder: Path,
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    on_answer: Callable[[], None],
) -> list[Compared]:
    """Ask the base model `model`, whose files are in `folder`, and the checkpoint all prompts.

    Raises EngineError, ModelNotFound and OSError.
    """
    policy = policy_in(checkpoint.folder)
    rank = adapter_rank(checkpoint.folder) if policy.form is WeightForm.PEFT else 0
    settings = source.settings.for_few_sequences(2 * len(prompts), rank, CACHE_GIB)
    async with contextlib.AsyncExitStack() as stack:
        factory = sampler_that_loads(policy.form, settings)
        sampler = factory.open(settings, Resources(stack), folder, model)
        stack.push_async_callback(sampler.close)
        await sampler.start()
        renderer = await asyncio.to_thread(ChatRenderer, folder)
        # A checkpoint may have version 0, which is the base model's here.
        version = max(checkpoint.version, BASE_VERSION + 1)
        await sampler.publish(version, policy)

        async def one(prompt: Prompt, asked: int) -> str:
            said = await answer_greedily(sampler, renderer, prompt.ids, asked, ANSWER_TOKENS)
            on_answer()
            return said

        said = await asyncio.gather(*(one(prompt, v) for prompt in prompts for v in (BASE_VERSION, version)))
    pairs = zip(prompts, said[::2], said[1::2], strict=True)
    return [Compared(prompt.question, before, after) for prompt, before, after in pairs]

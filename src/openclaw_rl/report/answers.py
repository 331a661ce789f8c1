"""What the base model and the newest checkpoint answer to the same prompts, without chance."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.assembly import start_model, worker_options
from openclaw_rl.config import Config
from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.engines.local.adapters import ADAPTER_CONFIG
from openclaw_rl.engines.local.sampler import LocalSampler
from openclaw_rl.learn.checkpoints import Checkpoint
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.rendering.tokenizer import BadModelFolder
from openclaw_rl.report.examples import Prompt
from openclaw_rl.types import BASE_VERSION, Priority, SampleRequest, SamplingParams

#: Longest answer.
ANSWER_TOKENS = 200
#: A handful of short sequences needs little: a server may be using the same machine.
CACHE_GIB = 0.5


class NoAnswers(Exception):
    """The models could not be asked; the message says why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Two answers to one prompt."""

    question: str
    before: str
    after: str


def compare(
    config: Config, folder: Path, checkpoint: Checkpoint, prompts: Sequence[Prompt], on_answer: Callable[[], None]
) -> list[Compared]:
    """Ask both models everything. Raises NoAnswers."""
    try:
        return asyncio.run(_compare(config, folder, checkpoint, prompts, on_answer))
    except (EngineError, BadModelFolder, OSError, ValueError) as error:
        raise NoAnswers(f"The models could not be asked: {error}") from error


async def _compare(
    config: Config, folder: Path, checkpoint: Checkpoint, prompts: Sequence[Prompt], on_answer: Callable[[], None]
) -> list[Compared]:
    fitting = config.model_copy(
        update={
            "lora_rank": rank_of(checkpoint.folder),
            "policy_slots": 2,
            "max_sequences": 2 * len(prompts),
            "kv_cache_gib": config.kv_cache_gib or CACHE_GIB,
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        sampler = LocalSampler(worker_options(fitting, folder), config.max_queue)
        model = await start_model(stack, sampler, folder)
        # Numbers of a run begin at 0, which is the base model here.
        version = max(checkpoint.version, BASE_VERSION + 1)
        await sampler.publish(version, checkpoint.folder)

        async def one(prompt: Prompt, asked: int) -> str:
            said = await answer(sampler, model.renderer, prompt, asked)
            on_answer()
            return said

        said = await asyncio.gather(*(one(prompt, v) for prompt in prompts for v in (BASE_VERSION, version)))
    pairs = zip(prompts, said[::2], said[1::2], strict=True)
    return [Compared(prompt.question, before, after) for prompt, before, after in pairs]


def rank_of(folder: Path) -> int:
    """The rank that a checkpoint's adapter has; 0 if it is a whole model."""
    path = folder / ADAPTER_CONFIG
    return int(json.loads(path.read_text())["r"]) if path.is_file() else 0


async def answer(sampler: Sampler, renderer: ChatRenderer, prompt: Prompt, version: int) -> str:
    room = sampler.limits.max_context_tokens - len(prompt.ids)
    if room < 1:
        return ""
    tokenizer = renderer.tokenizer
    params = SamplingParams(min(ANSWER_TOKENS, room), temperature=0.0, stop_token_ids=tokenizer.eos_ids)
    request = SampleRequest(list(prompt.ids), params, version=version, priority=Priority.BACKGROUND)
    written = [token.token_id async for tokens in sampler.sample(request) for token in tokens]
    return str(tokenizer.backend.decode(written, skip_special_tokens=True))

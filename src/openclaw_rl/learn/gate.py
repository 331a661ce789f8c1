"""A test that a new policy must pass before it serves: prompts with checks, from the user's file.

One JSON object per line: `prompt` (text, or a list of messages) and at least one of `contains`, `excludes` (text or
list of texts, case ignored), `matches` (regular expression), `max_words`, `min_words`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.config.options import ConfigError, read_text
from openclaw_rl.engines.base import Sampler
from openclaw_rl.rendering.chat import ChatRenderer, Message
from openclaw_rl.types import Priority, SampleRequest, SamplingParams

#: The longest answer to a prompt.
MAX_ANSWER_TOKENS = 256
#: Prompts that are asked at the same time. More would not be answered sooner, and would delay the judges.
MAX_CONCURRENT = 16
CHECKS = ("contains", "excludes", "matches", "max_words", "min_words")
EXPECTED = 'A line is a prompt with checks, such as {"prompt": "What is the capital of France?", "contains": "Paris"}.'


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and the checks on its answer."""

    messages: list[Message]
    checks: dict[str, Any]

    def passes(self, answer: str) -> bool:
        """Whether an answer passes all checks. An empty one never does."""
        words = len(answer.split())
        low = answer.lower()
        checks = self.checks
        return bool(words) and all(
            (
                all(text.lower() in low for text in texts(checks.get("contains"))),
                not any(text.lower() in low for text in texts(checks.get("excludes"))),
                "matches" not in checks or re.search(checks["matches"], answer) is not None,
                words <= checks.get("max_words", words),
                words >= checks.get("min_words", words),
            )
        )


class Gate:
    """Measures policies. One passes unless its score is below the serving policy's by more than `margin`."""

    def __init__(self, items: list[Item], margin: float, sampler: Sampler, renderer: ChatRenderer) -> None:
        self.items = items
        self.margin = margin
        self.sampler = sampler
        self.renderer = renderer

    async def examine(self, version: int) -> float:
        """The share of items that a policy version passes with greedy answers."""
        items = iter(self.items)
        workers = min(MAX_CONCURRENT, self.sampler.limits.max_sequences)
        passed = await gather_or_cancel([self._count_passed(items, version) for _ in range(workers)])
        return sum(passed) / len(self.items)

    async def _count_passed(self, items: Iterator[Item], version: int) -> int:
        """How many items pass, of those that this worker takes from the shared iterator."""
        return sum([item.passes(await self._answer(item, version)) for item in items])

    async def _answer(self, item: Item, version: int) -> str:
        ids = self.renderer.prompt(self.renderer.text(item.messages)).ids
        return await answer_greedily(self.sampler, self.renderer, ids, version, MAX_ANSWER_TOKENS)


async def answer_greedily(
    sampler: Sampler, renderer: ChatRenderer, prompt: Sequence[int], version: int, max_tokens: int
) -> str:
    """A policy version's greedy answer, sampled as background work; empty if the prompt fills the context."""
    room = sampler.limits.max_context_tokens - len(prompt)
    if room < 1:
        return ""
    params = SamplingParams(min(max_tokens, room), temperature=0.0, stop_token_ids=renderer.tokenizer.eos_ids)
    request = SampleRequest(list(prompt), params, version=version, priority=Priority.BACKGROUND)
    ids = [token.token_id async for tokens in sampler.sample(request) for token in tokens]
    return str(renderer.tokenizer.backend.decode(ids, skip_special_tokens=True))


def texts(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else given or []


def read_items(path: Path) -> list[Item]:
    """Read a gate file. Raises ConfigError that names the wrong line."""
    lines = read_text(path, "--gate").split("\n")
    items = [read_item(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not items:
        raise ConfigError(f"--gate: {path} has no prompts.")
    return items


def read_item(line: str, where: str) -> Item:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"--gate {where} is not JSON. {EXPECTED}") from None
    if not isinstance(given, dict) or "prompt" not in given:
        raise ConfigError(f"--gate {where} has no prompt. {EXPECTED}")
    prompt = given.pop("prompt")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if wrong := wrong_prompt(messages) or wrong_check(given):
        raise ConfigError(f"--gate {where}: {wrong}.")
    return Item(messages, given)


def wrong_prompt(messages: Any) -> str:
    """What is wrong with a prompt; empty if nothing is."""
    valid = isinstance(messages, list) and all(isinstance(one, dict) and "role" in one for one in messages)
    return "" if valid and messages else "a prompt is a text or a list of messages"


def wrong_check(given: dict[str, Any]) -> str:
    """What is wrong with a prompt's checks; empty if nothing is."""
    unknown = given.keys() - set(CHECKS)
    if unknown or not given:
        instead = f", not {', '.join(sorted(unknown))}" if unknown else ""
        return f"give some of {', '.join(CHECKS)}{instead}"
    for name in given.keys() & {"contains", "excludes"}:
        several = [given[name]] if isinstance(given[name], str) else given[name]
        if not (given[name] and isinstance(several, list) and all(isinstance(text, str) for text in several)):
            return f"{name} is a text or a list of texts"
    for name in given.keys() & {"max_words", "min_words"}:
        if not isinstance(given[name], int) or isinstance(given[name], bool):
            return f"{name} is a number"
    return wrong_pattern(given.get("matches", ""))


def wrong_pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        return "matches is a regular expression"
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        return f"matches is not a regular expression: {error}"
    return ""

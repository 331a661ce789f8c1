"""How a policy answers plain prompts: everyday questions and requests for code that we ship, and some of a run's own
first messages.

Every policy is asked with the same random draws. Only sense counts, and code where it is asked for: short answers,
another language or a pirate's tone are not worse. What it answers is not kept.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean

from openclaw_rl.engines.base import EngineError, QueueFull, Sampler
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import conversation_starts, load_readable
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.sense import check, is_other_language, lacks_code, repeats, words_of
from openclaw_rl.types import (
    BASE_VERSION,
    FinishReason,
    Priority,
    SampledToken,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
)

log = logging.getLogger(__name__)

PROMPTS = Path(__file__).with_name("plain_prompts.jsonl")
#: The run's own first messages: how many are asked, how long they may be, and how many turns are looked at for them.
MAX_OWN, MAX_OWN_CHARACTERS, MAX_SEARCHED_TURNS = 8, 300, 50
TEMPERATURE, MAX_TOKENS = 0.7, 96
PRACTISED = "practised-"
#: Prompts that are asked at the same time: few while others use the sampler, because their answers are sampled beside
#: them. This often it is looked whether others do; a token of 16 answers takes as long on two cores.
MAX_CONCURRENT, MAX_CONCURRENT_ALONE, LOOK_SECONDS = 2, 16, 0.02


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """A question that every policy is asked."""

    key: str
    """The same for the same question in every program."""
    text: str
    reference: str = ""
    """What an answer is about; empty if nobody knows, so that it may be about anything."""
    owner: str = ""

    def is_sensible(self, answer: str) -> bool:
        anything = not self.reference or is_other_language(answer)
        return check(answer, self.text, self.reference, translated=anything).ok and not lacks_code(answer, self.text)

    def seed(self, draw: int) -> int:
        """Of the random numbers for one of its answers, whichever policy gives it."""
        return zlib.crc32(f"{self.key} {draw}".encode())


@cache
def plain_prompts() -> tuple[PlainPrompt, ...]:
    """The questions that we ship."""
    read = map(json.loads, PROMPTS.read_text("utf-8").splitlines())
    return tuple(PlainPrompt(f"plain-{zlib.crc32(one['text'].encode()):08x}", **one) for one in read)


def practised_prompt(text: str, owner: str) -> PlainPrompt:
    """A message of the kind that a note with a scope is for. Nobody knows what its answer is about."""
    return PlainPrompt(f"{PRACTISED}{zlib.crc32(text.encode()):08x}", text, owner=owner)


def own_prompts(ledger: Ledger, owner: str | None = None) -> list[PlainPrompt]:
    """The first messages of the run's first conversations, or of an owner's: short ones, without a system prompt and
    tools, each once."""
    found: dict[str, PlainPrompt] = {}
    for number in ledger.read(conversation_starts, MAX_SEARCHED_TURNS, owner):
        turn = ledger.read(load_readable, number)
        messages = turn.messages if turn else []
        text = messages[0].get("content") if len(messages) == 1 and messages[0].get("role") == "user" else None
        if turn and isinstance(text, str) and text.strip() and len(text) <= MAX_OWN_CHARACTERS:
            found.setdefault(text, PlainPrompt(f"turn-{number}", text, owner=turn.session.owner))
        if len(found) == MAX_OWN:
            break
    return list(found.values())


@dataclass(frozen=True, slots=True)
class PlainAnswers:
    """How a policy answered."""

    version: int
    sensible: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    """For each prompt: whether its answers were sensible, one for each round."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Of the first round, by the names in `guard.NUMBERS`."""
    created: float = 0.0

    @property
    def passed(self) -> int:
        return sum(map(sum, self.sensible.values()))

    @property
    def asked(self) -> int:
        return sum(map(len, self.sensible.values()))

    def without_practised(self) -> "PlainAnswers":
        return replace(self, sensible={key: got for key, got in self.sensible.items() if not key.startswith(PRACTISED)})

    def shared(self, other: "PlainAnswers") -> "PlainAnswers":
        """The same without the prompts that another policy was not asked."""
        return replace(self, sensible={key: got for key, got in self.sensible.items() if key in other.sensible})


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """What is known about one answer, without its text."""

    key: str
    draw: int
    sensible: bool
    tokens: int
    faulty: bool
    own: Sequence[float] | None
    base: Sequence[float] | None


class PlainAsker:
    """Asks policies plain prompts, as background work, so that requests of users go first."""

    def __init__(self, sampler: Sampler, renderer: ChatRenderer) -> None:
        self.sampler = sampler
        self.renderer = renderer
        self._open_requests = 0

    async def ask(self, known: PlainAnswers, prompts: Sequence[PlainPrompt], rounds: int) -> PlainAnswers:
        """The same with so many answers to each prompt."""
        missing = [
            (prompt, draw) for prompt in prompts for draw in range(len(known.sensible.get(prompt.key, ())), rounds)
        ]
        if not missing:
            return known
        got = sorted(await self._answers(missing, known.version), key=lambda one: one.draw)
        sensible = {key: list(values) for key, values in known.sensible.items()}
        for answer in got:
            sensible.setdefault(answer.key, []).append(answer.sensible)
        numbers = known.numbers or summary([answer for answer in got if answer.draw == 0])
        return replace(known, sensible=sensible, numbers=numbers, created=known.created or time.time())

    async def _answers(self, questions: Sequence[tuple[PlainPrompt, int]], version: int) -> list[PlainAnswer]:
        """The answers to all of them. When others ask, the newest answers are stopped, and asked for again later."""
        left = deque(questions)
        asked: dict[asyncio.Task[PlainAnswer | None], tuple[PlainPrompt, int]] = {}
        answers = []
        try:
            while left or asked:
                most = self._most_at_once()
                for task in list(asked)[most:]:
                    task.cancel()
                    left.appendleft(asked.pop(task))
                while left and len(asked) < most:
                    question = left.popleft()
                    asked[asyncio.create_task(self._answer(*question, version))] = question
                ended, _ = await asyncio.wait(asked, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                answers += [task.result() for task in ended]
                asked = {task: question for task, question in asked.items() if task not in ended}
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if answer]

    def _most_at_once(self) -> int:
        stats = self.sampler.stats()
        others_ask = stats.active + stats.waiting > self._open_requests
        return min(MAX_CONCURRENT if others_ask else MAX_CONCURRENT_ALONE, self.sampler.limits.max_sequences)

    async def _answer(self, prompt: PlainPrompt, draw: int, version: int) -> PlainAnswer | None:
        """A policy's answer; None if the prompt does not fit into the context."""
        ids = self.renderer.prompt(self.renderer.text([{"role": "user", "content": prompt.text}])).ids
        room = self.sampler.limits.max_context_tokens - len(ids)
        if room < 1:
            return None
        stops = self.renderer.tokenizer.eos_ids
        params = SamplingParams(min(MAX_TOKENS, room), TEMPERATURE, seed=prompt.seed(draw), stop_token_ids=stops)
        request = SampleRequest(ids, params, version=version, priority=Priority.BACKGROUND, owner=prompt.owner)
        tokens = await self._tokens(request)
        sampled = [token.token_id for token in tokens]
        text = str(self.renderer.tokenizer.backend.decode(sampled, skip_special_tokens=True))
        faulty = tokens[-1].finish is FinishReason.LENGTH or repeats(words_of(text))
        raw = self.sampler.capabilities.raw_logprobs
        own = [token.logprob for token in tokens] if raw else None
        base = await self._base_logprobs(request, sampled, own, version) if draw == 0 else None
        return PlainAnswer(prompt.key, draw, prompt.is_sensible(text), len(sampled), faulty, own, base)

    async def _tokens(self, request: SampleRequest) -> list[SampledToken]:
        """The tokens of an answer, once the queue has room for it."""
        while True:
            self._open_requests += 1
            try:
                with contextlib.closing(self.sampler.sample(request)) as stream:
                    return [token async for tokens in stream for token in tokens]
            except QueueFull as error:
                wait = error.retry_after
            finally:
                self._open_requests -= 1
            await asyncio.sleep(wait)

    async def _base_logprobs(
        self, request: SampleRequest, sampled: Sequence[int], own: Sequence[float] | None, version: int
    ) -> Sequence[float] | None:
        """The log-probs of an answer under the base model, if it can be asked."""
        if version == BASE_VERSION:
            return own
        if not self.sampler.capabilities.keeps_base:
            return None
        ids = [*request.prompt_ids, *sampled]
        try:
            return (await self.sampler.score(ScoreRequest(ids, len(sampled), owner=request.owner))).logprobs
        except EngineError as error:
            log.debug("The base model cannot score an answer: %s", error)
            return None


def summary(answers: Sequence[PlainAnswer]) -> dict[str, float]:
    """The numbers of a round."""
    if not answers:
        return {}
    base = [logprob for answer in answers for logprob in answer.base or ()]
    pairs = [(answer.own, answer.base) for answer in answers if answer.own and answer.base]
    gaps = [mine - theirs for own, others in pairs for mine, theirs in zip(own, others, strict=True)]
    numbers = {
        "sensible": fmean(answer.sensible for answer in answers),
        "tokens": fmean(answer.tokens for answer in answers),
        "faulty": fmean(answer.faulty for answer in answers),
        **({"distance": fmean(gaps)} if gaps else {}),
        **({"perplexity": math.exp(-fmean(base))} if base else {}),
    }
    return {name: round(value, 4) for name, value in numbers.items()}

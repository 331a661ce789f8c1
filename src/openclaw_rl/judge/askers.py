"""Where a judging language model is: on the engine that serves, or behind any OpenAI-compatible endpoint."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.judge.errors import JudgeDown, JudgeFailed
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message
from openclaw_rl.types import BASE_VERSION, FinishReason, Priority, SampledToken, SampleRequest, SamplingParams

#: A judge that has fewer tokens left than this for its answer cannot give one.
MIN_ANSWER_TOKENS = 64
#: Statuses that pass by themselves or are mended by the owner, not by another turn.
AWAY = (401, 402, 403, 404, 408, 409, 425, 429)
MENDING = {
    401: "check OPENCLAW_JUDGE_API_KEY",
    403: "check OPENCLAW_JUDGE_API_KEY",
    404: "check --judge-base-url and --judge-model",
}


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """One of the answers to a question."""

    text: str
    seconds: float
    tokens: int
    """Read and written, what was read being shared among the answers."""
    cut_off: bool
    """Whether it ended only because it ran out of tokens."""


@dataclass(frozen=True, slots=True)
class AskParams:
    """How to ask."""

    votes: int
    temperature: float
    max_tokens: int


class Asker(Protocol):
    """Puts a chat to a model and brings several answers. Raises JudgeDown and JudgeFailed."""

    async def ask(self, chat: Sequence[Message], params: AskParams, seed: int) -> list[JudgeAnswer]: ...


class EngineAsker:
    """Asks the base weights on an engine, behind its users: all answers share one reading of the prompt."""

    def __init__(self, sampler: Sampler, renderer: ChatRenderer) -> None:
        self.sampler, self.renderer = sampler, renderer

    async def ask(self, chat: Sequence[Message], params: AskParams, seed: int) -> list[JudgeAnswer]:
        started = time.monotonic()
        try:
            prompt = self.renderer.prompt(self.renderer.text(chat))
        except ChatError as error:
            raise JudgeFailed(str(error)) from error
        ids = prompt.ids
        room = self.sampler.limits.max_context_tokens - len(ids)
        if room < MIN_ANSWER_TOKENS:
            raise JudgeFailed(f"the turn is too long for the judge's context: {len(ids)} tokens")
        sampling = SamplingParams(
            max_tokens=min(params.max_tokens, room),
            temperature=params.temperature,
            seed=seed,
            stop_token_ids=frozenset(self.renderer.tokenizer.eos_ids),
        )
        request = SampleRequest(ids, sampling, params.votes, version=BASE_VERSION, priority=Priority.BACKGROUND)
        written: list[list[SampledToken]] = [[] for _ in range(params.votes)]
        try:
            async for tokens in self.sampler.sample(request):
                for token in tokens:
                    written[token.index].append(token)
        except EngineError as error:
            raise JudgeDown(str(error)) from error
        # What the prompt opened is part of the answer: without it, thoughts would be read as one.
        opening = "<think>" if prompt.opens_reasoning else ""
        read, seconds = len(ids) // params.votes, time.monotonic() - started
        return [
            JudgeAnswer(opening + self._decode(own), seconds, read + len(own), any(map(ran_out, own)))
            for own in written
        ]

    def _decode(self, tokens: Sequence[SampledToken]) -> str:
        ids = [token.token_id for token in tokens]
        return self.renderer.tokenizer.backend.decode(ids, skip_special_tokens=True)


def ran_out(token: SampledToken) -> bool:
    """Whether an answer ends with it for want of more tokens."""
    return token.finish is FinishReason.LENGTH


class EndpointAsker:
    """Asks an OpenAI-compatible endpoint. One that ignores `n` is asked again for the answers that are missing."""

    def __init__(self, base_url: str, model: str, key: str = "") -> None:
        self.model = model
        # A key from a file often ends with its line.
        headers = {"Authorization": f"Bearer {key.strip()}"} if key.strip() else {}
        headers["Content-Type"] = "application/json"
        # How long to wait is the caller's decision.
        self._client = httpx.AsyncClient(headers=headers, timeout=None)
        self._url = f"{base_url.rstrip('/')}/chat/completions"

    async def ask(self, chat: Sequence[Message], params: AskParams, seed: int) -> list[JudgeAnswer]:
        answers = await self._ask(chat, params, params.votes, seed)
        missing = range(len(answers), params.votes)
        more = await asyncio.gather(*(self._ask(chat, params, 1, seed + place) for place in missing))
        return [*answers, *(answer for some in more for answer in some)][: params.votes]

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, chat: Sequence[Message], params: AskParams, n: int, seed: int) -> list[JudgeAnswer]:
        started = time.monotonic()
        body = {
            "model": self.model,
            "messages": list(chat),
            "n": n,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "seed": seed,
        }
        try:
            # All of it in ASCII: half a character, which a turn may have, is then no obstacle.
            response = await self._client.post(self._url, content=json.dumps(body))
        except httpx.LocalProtocolError:
            # What it says would show the key.
            raise JudgeDown("the key for the judge cannot be sent in a header: check OPENCLAW_JUDGE_API_KEY") from None
        except httpx.HTTPError as error:
            reason = f"{self._url} cannot be reached: {type(error).__name__} {error}".rstrip()
            raise JudgeDown(reason, suspect=not isinstance(error, httpx.ConnectError)) from error
        return read_answers(self._checked(response), time.monotonic() - started)

    def _checked(self, response: httpx.Response) -> Any:
        """The body of an answer that is one."""
        status = response.status_code
        if status in AWAY or status >= 500:
            advice = f": {MENDING[status]}" if status in MENDING else ""
            reason = f"{self._url} answers {status}{advice}"
            raise JudgeDown(reason, retry_after(response.headers), suspect=status >= 500)
        if status != 200:
            raise JudgeFailed(f"the judge answers {status}: {response.text[:200]}")
        try:
            return response.json()
        except ValueError as error:
            raise JudgeFailed("the judge's answer is no JSON") from error


def read_answers(body: Any, seconds: float) -> list[JudgeAnswer]:
    """The answers in a chat completion. Raises JudgeFailed if it is none."""
    try:
        choices = body["choices"]
        texts = [choice["message"]["content"] or "" for choice in choices]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TypeError
        cut_off = [choice.get("finish_reason") == FinishReason.LENGTH for choice in choices]
        usage = body.get("usage") or {}
        used = [int(usage.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
        tokens = max(0, sum(used)) // len(texts)
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise JudgeFailed("the judge's answer is not a chat completion") from error
    return [JudgeAnswer(text, seconds, tokens, cut) for text, cut in zip(texts, cut_off, strict=True)]


def retry_after(headers: Mapping[str, str]) -> float:
    """How many seconds a service asks to be left alone; a date or nonsense counts as nothing said."""
    try:
        return min(600.0, max(0.0, float(headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0

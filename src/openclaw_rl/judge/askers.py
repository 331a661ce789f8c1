"""Asks a judging language model: on the engine that serves, or behind an OpenAI-compatible endpoint."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openclaw_rl.client import ApiClient, ServerError
from openclaw_rl.engines.base import ApiRefused, ChatCall, EngineError, Sampler, TextSampler
from openclaw_rl.http_client import HttpResponse
from openclaw_rl.judge.judges.base import JudgeDown, JudgeError, JudgeFailed
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message
from openclaw_rl.types import BASE_VERSION, FinishReason, Priority, SampledToken, SampleRequest, SamplingParams

#: A judge needs at least this many tokens for its answer.
MIN_ANSWER_TOKENS = 64
#: Of an endpoint's body, no more is read. The longest answers that can be asked for are far shorter.
MAX_BODY_BYTES = 4 << 20
#: HTTP statuses that are no fault of the turn: they pass, or the owner must act.
DOWN_STATUSES = (401, 402, 403, 404, 408, 409, 425, 429)
CHECK_KEY = "check OPENCLAW_JUDGE_API_KEY"
ADVICE = {401: CHECK_KEY, 403: CHECK_KEY, 404: "check --judge-base-url and --judge-model"}
#: How much of a judge's refusal is repeated.
MAX_REFUSAL_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """One answer to a question."""

    text: str
    seconds: float
    tokens: int
    """Prompt and completion tokens. The prompt's tokens are divided among the answers."""
    cut_off: bool
    """Whether it ended at the token limit."""


@dataclass(frozen=True, slots=True)
class AskParams:
    """How many answers to sample, and how."""

    votes: int
    temperature: float
    max_tokens: int


class Asker(Protocol):
    """Sends a chat to a model and returns several answers. Raises JudgeDown and JudgeFailed."""

    async def ask(self, chat: Sequence[Message], params: AskParams, seed: int) -> list[JudgeAnswer]: ...


class EngineAsker:
    """Asks the base model on an engine as background work. All answers share one prefill of the prompt."""

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
        completions: list[list[SampledToken]] = [[] for _ in range(params.votes)]
        try:
            async for tokens in self.sampler.sample(request):
                for token in tokens:
                    completions[token.index].append(token)
        except EngineError as error:
            raise JudgeDown(str(error)) from error
        # The prompt may have opened a reasoning block. Without its tag, thoughts would count as the answer.
        opening = "<think>" if prompt.opens_reasoning else ""
        prompt_tokens, seconds = len(ids) // params.votes, time.monotonic() - started
        return [
            JudgeAnswer(
                opening + self._decode(sampled), seconds, prompt_tokens + len(sampled), any(map(ran_out, sampled))
            )
            for sampled in completions
        ]

    def _decode(self, tokens: Sequence[SampledToken]) -> str:
        ids = [token.token_id for token in tokens]
        return self.renderer.tokenizer.backend.decode(ids, skip_special_tokens=True)


def ran_out(token: SampledToken) -> bool:
    """Whether an answer ended with this token at the token limit."""
    return token.finish is FinishReason.LENGTH


class TextAsker:
    """Asks the model behind the API that answers, as background work."""

    def __init__(self, sampler: TextSampler) -> None:
        self.sampler = sampler

    async def ask(self, chat: Sequence[Message], params: AskParams, seed: int) -> list[JudgeAnswer]:
        started = time.monotonic()
        body = {"messages": list(chat), "temperature": params.temperature, "max_tokens": params.max_tokens}
        texts = [""] * params.votes
        cut_off = [False] * params.votes
        try:
            stream = self.sampler.chat(ChatCall({**body, "seed": seed}, params.votes, Priority.BACKGROUND))
            async for pieces in stream:
                for piece in pieces:
                    texts[piece.index] += "".join(delta for delta in piece.deltas if isinstance(delta, str))
                    cut_off[piece.index] |= piece.finish == FinishReason.LENGTH
        except ApiRefused as error:
            if error.status in DOWN_STATUSES or error.status >= 500:
                raise JudgeDown(str(error), error.retry_after or 0.0, suspect=error.status >= 500) from error
            raise JudgeFailed(str(error)[:MAX_REFUSAL_CHARACTERS]) from error
        except EngineError as error:
            raise JudgeDown(str(error)) from error
        tokens = (stream.usage.get("prompt_tokens", 0) + stream.usage.get("completion_tokens", 0)) // params.votes
        seconds = time.monotonic() - started
        return [JudgeAnswer(text, seconds, tokens, cut) for text, cut in zip(texts, cut_off, strict=True)]


class EndpointAsker:
    """Asks an OpenAI-compatible endpoint.

    * If it ignores `n`, it is asked again for the missing answers.
    * Whatever it sends, at most `MAX_BODY_BYTES` of it are kept in memory.
    * It may be reached through a proxy. The caller sets the timeout.
    """

    def __init__(self, base_url: str, model: str, key: str = "") -> None:
        self.model = model
        self._api = ApiClient(
            base_url,
            key,
            key_advice=CHECK_KEY,
            # A small compressed body can become a huge one.
            headers={"Accept-Encoding": "identity"},
            through_proxy=True,
            max_body_bytes=MAX_BODY_BYTES,
        )

    async def ask(self, chat: Sequence[Message], params: AskParams, seed: int) -> list[JudgeAnswer]:
        answers = await self._ask(chat, params, params.votes, seed)
        missing = range(len(answers), params.votes)
        more = await asyncio.gather(*(self._ask(chat, params, 1, seed + index) for index in missing))
        return [*answers, *(answer for some in more for answer in some)][: params.votes]

    async def close(self) -> None:
        await self._api.close()

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
            response = await self._api.call("POST", "/chat/completions", body)
        except ServerError as error:
            raise self._failure(error) from error
        return read_answers(self._json(response), time.monotonic() - started)

    def _failure(self, error: ServerError) -> JudgeError:
        """JudgeDown for what is no fault of the turn, else JudgeFailed."""
        status = error.status
        if not status:
            return JudgeDown(f"{self._api.url} cannot be reached: {error.message}", suspect=error.was_sent)
        if status in DOWN_STATUSES or status >= 500:
            advice = f": {ADVICE[status]}" if status in ADVICE else ""
            reason = f"{self._api.url} answers {status}{advice}"
            return JudgeDown(reason, error.retry_after or 0.0, suspect=status >= 500)
        return JudgeFailed(f"the judge answers {status}: {error.message[:MAX_REFUSAL_CHARACTERS]}")

    def _json(self, response: HttpResponse) -> Any:
        if response.is_cut:
            raise JudgeFailed(f"the judge's answer is larger than {MAX_BODY_BYTES >> 20} MiB")
        try:
            return response.json()
        except (ValueError, RecursionError) as error:  # the latter for deeply nested brackets
            raise JudgeFailed("the judge's answer is not JSON") from error


def read_answers(body: Any, seconds: float) -> list[JudgeAnswer]:
    """The answers in a chat completion. Raises JudgeFailed if the body is not one."""
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

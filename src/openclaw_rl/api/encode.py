"""Encodes completions in OpenAI's format: as one body, or as a stream of chunks."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import to_json
from tokenizers import Tokenizer

from openclaw_rl.api.completion import ChoiceUpdate, Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.message import tool_call
from openclaw_rl.api.wire import ChatRequest, parse_request
from openclaw_rl.rendering.detokenize import token_bytes
from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall
from openclaw_rl.types import SampledToken

DONE = b"data: [DONE]\n\n"


class Encoder:
    """Encodes the completions of one model."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    async def whole(self, completion: Completion, logprobs: int | None) -> bytes:
        """The body of an answer that is not streamed.

        `logprobs` is the number of likeliest tokens to list at each position; None leaves log-probs out.
        """
        async for _update in completion:
            pass
        choices = []
        for index, choice in enumerate(completion.choices):
            entry = {"index": index, "message": choice.message.body(), "finish_reason": choice.finish_reason}
            entry["logprobs"] = None if logprobs is None else self._logprobs(choice.tokens, logprobs)
            choices.append(entry)
        return to_json({**self._head(completion, ""), "choices": choices, "usage": completion.usage()})

    async def chunks(self, completion: Completion, logprobs: int | None, usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events, each as soon as it is known. An error after the start is sent as an event."""
        head = self._head(completion, ".chunk")
        if usage:
            head["usage"] = None
        calls = [0] * len(completion.choices)
        try:
            for index in range(len(completion.choices)):
                yield event({**head, "choices": [chunk(index, {"role": "assistant", "content": ""})]})
            async for update in completion:
                for choice in self._chunk_choices(update, calls, logprobs):
                    yield event({**head, "choices": [choice]})
        except ApiError as error:
            yield event(error.body())
            return
        if usage:
            yield event({**head, "choices": [], "usage": completion.usage()})
        yield DONE

    def _chunk_choices(self, update: ChoiceUpdate, calls: list[int], logprobs: int | None) -> list[dict[str, Any]]:
        choices = []
        for delta in update.deltas:
            for part in delta_parts(delta, calls[update.index]):
                choices.append(chunk(update.index, part))
            calls[update.index] += isinstance(delta, ParsedToolCall)
        if logprobs is not None:
            # Log-probs are sent when their token is sampled, even if the token's text is still held back.
            choices = choices or [chunk(update.index, {})]
            choices[0]["logprobs"] = self._logprobs(update.tokens, logprobs)
        if update.finish_reason is not None:
            choices.append(chunk(update.index, {}, update.finish_reason))
        return choices

    def _head(self, completion: Completion, suffix: str) -> dict[str, Any]:
        return {
            "id": completion.id,
            "object": f"chat.completion{suffix}",
            "created": completion.created,
            "model": self.model,
            "system_fingerprint": f"policy-{completion.version}",
        }

    def _logprobs(self, tokens: list[SampledToken], top_n: int) -> dict[str, Any]:
        content = []
        for token in tokens:
            top = [self._logprob(id, value) for id, value in token.top[:top_n]]
            content.append({**self._logprob(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token_id: int, value: float) -> dict[str, Any]:
        raw = token_bytes(self.tokenizer, token_id)
        return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}


class ChatWire:
    """Implements `Wire`: OpenAI's chat completions."""

    id_prefix = "chatcmpl-"
    names: Mapping[str, str] = {}
    request: ChatRequest

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def parse(self, body: bytes) -> ChatRequest:
        self.request = parse_request(body)
        return self.request

    async def whole(self, completion: Completion) -> bytes:
        return await self.encoder.whole(completion, self.request.top_logprobs_wanted)

    def events(self, completion: Completion) -> AsyncIterator[bytes]:
        return self.encoder.chunks(completion, self.request.top_logprobs_wanted, self.request.wants_usage)


def delta_parts(delta: Delta, number: int) -> list[dict[str, Any]]:
    """A delta as `delta` fields of chunks; a tool call becomes two: its name, then its arguments."""
    match delta:
        case ReasoningText(text):
            return [{"reasoning_content": text}]
        case ParsedToolCall():
            opening = {"index": number, **tool_call(ParsedToolCall(delta.id, delta.name, ""))}
            arguments = {"index": number, "function": {"arguments": delta.arguments}}
            return [{"tool_calls": [opening]}, {"tool_calls": [arguments]}]
        case _:
            return [{"content": delta}]


def chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"

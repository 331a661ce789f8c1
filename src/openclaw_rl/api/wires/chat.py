"""OpenAI's chat completions: an answer as one body, or as a stream of chunks."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from pydantic_core import to_json
from tokenizers import Tokenizer

from openclaw_rl.api.completion import ChoiceUpdate, Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest, parse
from openclaw_rl.api.wires.base import DONE, EVENTS, data_event
from openclaw_rl.rendering.response import Delta, ReasoningText, tool_call
from openclaw_rl.rendering.tokenizer import token_bytes
from openclaw_rl.rendering.tool_calls import ParsedToolCall
from openclaw_rl.types import SampledToken


class ChatWire:
    """Implements `Wire`: OpenAI's chat completions."""

    id_prefix = "chatcmpl-"
    names: Mapping[str, str] = {}
    media_type = EVENTS
    request: ChatRequest

    def __init__(self, model: str, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer, answers have no log-probs."""
        self.model = model
        self.tokenizer = tokenizer

    def parse(self, body: bytes) -> ChatRequest:
        self.request = parse(ChatRequest, body)
        return self.request

    async def whole(self, completion: Completion) -> bytes:
        async for _update in completion:
            pass
        choices = []
        for index, choice in enumerate(completion.choices):
            entry = {"index": index, "message": choice.message.body(), "finish_reason": choice.finish_reason}
            choices.append({**entry, "logprobs": self._logprobs(choice.tokens)})
        head = completion.head("chat.completion", self.model)
        return to_json({**head, "choices": choices, "usage": completion.usage()})

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        head = completion.head("chat.completion.chunk", self.model)
        if self.request.wants_usage:
            head["usage"] = None
        calls = [0] * len(completion.choices)
        try:
            for index in range(len(completion.choices)):
                yield data_event({**head, "choices": [chunk(index, {"role": "assistant", "content": ""})]})
            async for update in completion:
                for choice in self._chunk_choices(update, calls):
                    yield data_event({**head, "choices": [choice]})
        except ApiError as error:
            yield data_event(error.body())
            return
        if self.request.wants_usage:
            yield data_event({**head, "choices": [], "usage": completion.usage()})
        yield DONE

    def _chunk_choices(self, update: ChoiceUpdate, calls: list[int]) -> list[dict[str, Any]]:
        choices = []
        for delta in update.deltas:
            for part in delta_parts(delta, calls[update.index]):
                choices.append(chunk(update.index, part))
            calls[update.index] += isinstance(delta, ParsedToolCall)
        if self.request.top_logprobs_wanted is not None:
            # Log-probs are sent when their token is sampled, even if the token's text is still held back.
            choices = choices or [chunk(update.index, {})]
            choices[0]["logprobs"] = self._logprobs(update.tokens)
        if update.finish_reason is not None:
            choices.append(chunk(update.index, {}, update.finish_reason))
        return choices

    def _logprobs(self, tokens: list[SampledToken]) -> dict[str, Any] | None:
        top_n = self.request.top_logprobs_wanted
        if top_n is None:
            return None
        content = []
        for token in tokens:
            top = [self._logprob(id, value) for id, value in token.top[:top_n]]
            content.append({**self._logprob(token.token_id, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _logprob(self, token_id: int, value: float) -> dict[str, Any]:
        assert self.tokenizer is not None
        raw = token_bytes(self.tokenizer, token_id)
        return {"token": raw.decode(errors="replace"), "logprob": value, "bytes": list(raw)}


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

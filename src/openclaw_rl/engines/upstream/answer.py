"""Reads one answer of an OpenAI-compatible API: its events as text, reasoning and whole tool calls."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from openclaw_rl.client import error_message, events
from openclaw_rl.engines.base import ApiRefused
from openclaw_rl.http_client import HttpError, HttpResponse
from openclaw_rl.rendering.reasoning import ReasoningSplitter, WholeText
from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall, new_call_id

#: The status of an answer that broke off or cannot be read.
BAD_GATEWAY = 502
BROKEN = "upstream_broken"
BROKE_OFF = "The API broke off its answer"
WRONG_FORM = "The API answers in a form that is not OpenAI's"
#: The names under which APIs send reasoning.
REASONING = ("reasoning_content", "reasoning")
EVENTS = "text/event-stream"
#: OpenAI's reasons for the end of an answer that every wire of ours knows.
FINISHES = ("stop", "length", "tool_calls")
COUNTS = ("prompt_tokens", "completion_tokens")


async def answer_events(answer: HttpResponse) -> AsyncIterator[Any]:
    """The events of an answer; one that is not streamed is a single event. Raises HttpError."""
    if EVENTS in answer.headers.get("content-type", EVENTS):
        async for event in events(answer):
            yield event
        return
    try:
        yield from_json(await answer.read())
    except ValueError as error:
        raise HttpError(f"the answer is not JSON: {error}") from error


class AnswerReader:
    """Reads one answer. Raises ApiRefused for an error within it, and for what is not an answer.

    - A tool call is given when it is whole, as a JSON object.
    - Reasoning is given apart, also if the API writes it as a `<think>` block.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._splitter = ReasoningSplitter() if is_chat else WholeText()
        self._call: dict[str, Any] | None = None
        self._calls = 0
        self.finish: str | None = None
        """Why the answer ended, once it has."""
        self.usage: dict[str, int] = {}

    def read(self, event: Any) -> tuple[Delta, ...]:
        """What became certain with an event."""
        try:
            if event.get("error"):
                raise failure_within(event)
            self.usage |= read_usage(event.get("usage") or {})
            choice = (event.get("choices") or [{}])[0]
            new = tuple(self._read(choice.get("delta") or choice.get("message") or choice))
            if choice.get("finish_reason"):
                new += tuple(self._end())
                self.finish = self._finish(choice["finish_reason"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ApiRefused(f"{WRONG_FORM} ({error!r}).", BAD_GATEWAY, BROKEN) from error
        return new

    def _read(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if thought := next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), ""):
            yield ReasoningText(thought)
        if text := delta.get("content") or delta.get("text"):
            for channel, piece in self._splitter.push(text):
                yield ReasoningText(piece) if channel == "reasoning" else piece
        for part in delta.get("tool_calls") or ():
            yield from self._add(part)

    def _add(self, part: Mapping[str, Any]) -> Iterator[Delta]:
        """Add a part of a call. Some APIs number all calls 0 and tell them apart by their ids."""
        call = self._call
        place, id = part.get("index", 0), part.get("id") or ""
        if call is None or place != call["index"] or (id and call["id"] and id != call["id"]):
            yield from self._whole_call()
            call = self._call = {"index": place, "id": "", "name": "", "arguments": ""}
        function = part.get("function") or {}
        call["id"] = call["id"] or id
        call["name"] += function.get("name") or ""
        given = function.get("arguments") or ""
        call["arguments"] += given if isinstance(given, str) else json.dumps(given)

    def _whole_call(self) -> Iterator[Delta]:
        call, self._call = self._call, None
        if call is None:
            return
        arguments = call["arguments"].strip() or "{}"
        if not isinstance(from_json(arguments), dict):
            raise TypeError("a call's arguments are not an object")
        self._calls += 1
        yield ParsedToolCall(call["id"] or new_call_id(), call["name"], arguments)

    def _end(self) -> Iterator[Delta]:
        for channel, piece in self._splitter.flush():
            yield ReasoningText(piece) if channel == "reasoning" else piece
        yield from self._whole_call()

    def _finish(self, reason: str) -> str:
        if self._calls and reason != "length":
            return "tool_calls"
        return reason if reason in FINISHES[:2] else "stop"


def failure_within(event: Mapping[str, Any]) -> ApiRefused:
    """The error that an API sends in place of the rest of an answer."""
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else BAD_GATEWAY
    message = f"{BROKE_OFF}: {error_message(event)}"
    return ApiRefused(message, status, code if isinstance(code, str) else BROKEN)


def read_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """OpenAI's numbers of tokens, as far as they are there."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    found = {name: usage.get(name) for name in COUNTS} | {"cached_tokens": cached}
    return {name: int(number) for name, number in found.items() if isinstance(number, int)}

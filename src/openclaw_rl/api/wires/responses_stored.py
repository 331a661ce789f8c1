"""A recorded answer as a response of the Responses API."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from openclaw_rl.api.message import Piece
from openclaw_rl.api.wires.blocks import Block, BlockReader
from openclaw_rl.api.wires.responses_body import (
    INSTRUCTED,
    LEFT_OUT,
    RESPONSE,
    repeated_fields,
    response_body,
    usage_body,
)
from openclaw_rl.api.wires.responses_events import ItemWriter
from openclaw_rl.api.wires.responses_request import ResponsesRequest
from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall
from openclaw_rl.types import StoredTurn

#: How clients ask for reasoning as `encrypted_content`.
ENCRYPTED = "reasoning.encrypted_content"


def recorded_details(request: ResponsesRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What is recorded with the answer to a request, beyond its messages, so that it can be given again.

    `tools` are those of the request, as the response repeats them.
    """
    given = {name: value for name, value in repeated_fields(request).items() if value != LEFT_OUT[name]}
    if request.tool_choice == "none" and tools:
        # Tools that the model is not shown are no part of the recorded messages.
        given["tools"] = tools
    details = {"response": given, "encrypted": ENCRYPTED in (request.include or ())}
    return {name: value for name, value in details.items() if value}


def stored_response(turn: StoredTurn, model: str) -> dict[str, Any]:
    """The response as it was given. An answer of another wire has no fields that repeat its request."""
    is_cut, details = turn.finish_reason == "length", turn.details
    suffix = turn.completion.removeprefix(INSTRUCTED).removeprefix(RESPONSE)
    writer = ItemWriter(suffix, is_encrypted=details.get("encrypted", False))
    tools: list[Any] = next((message["tools"] for message in turn.messages if message["role"] == "tools"), [])
    system = next((message["content"] for message in turn.messages if message["role"] == "system"), None)
    repeated = {
        "instructions": system if turn.completion.startswith(INSTRUCTED) else None,
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
        "temperature": turn.sampling.get("temperature"),
        "top_p": turn.sampling.get("top_p"),
        **details.get("response", {}),
    }
    return response_body(
        turn.completion,
        model,
        int(turn.created),
        [writer.item(block) for block in blocks(turn.message, details.get("order"), is_cut)],
        repeated,
        usage_body(len(turn.prompt_ids), details.get("cached_tokens", 0), len(turn.response_ids)),
        is_cut=is_cut,
        is_stored=True,
    )


def blocks(message: dict[str, Any], order: list[Piece] | None, is_cut: bool) -> list[Block]:
    """An answer's reasoning, text and calls in the order in which they came."""
    reader = BlockReader()
    for _event in (*reader.push(list(deltas(message, order))), *reader.close(is_cut)):
        pass
    return reader.blocks


def deltas(message: dict[str, Any], order: list[Piece] | None) -> Iterator[Delta]:
    """The pieces of a message; without an order, reasoning, then text, then calls."""
    thoughts, content = message.get("reasoning_content") or "", message.get("content") or ""
    calls = iter(message.get("tool_calls") or ())
    if order is None:
        order = [("reasoning", len(thoughts)), ("text", len(content)), ("call", len(message.get("tool_calls") or ()))]
    for kind, length in order:
        if kind == "call":
            for call in islice(calls, length):
                yield ParsedToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        elif kind == "reasoning" and length:
            yield ReasoningText(thoughts[:length])
            thoughts = thoughts[length:]
        elif length:
            yield content[:length]
            content = content[length:]

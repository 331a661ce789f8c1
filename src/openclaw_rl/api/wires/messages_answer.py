"""Answers of Anthropic's Messages API: as one message, or as a stream of events."""

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.api.wires.base import event
from openclaw_rl.api.wires.blocks import Block, BlockEvent, BlockReader
from openclaw_rl.api.wires.messages_request import NAMES, parse_messages

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesWire:
    """Implements `Wire`. The streamed message and the whole one are made from the same blocks."""

    id_prefix, names = "msg_", NAMES

    def __init__(self, model: str) -> None:
        self.model = model

    def parse(self, body: bytes) -> ChatRequest:
        return parse_messages(body)

    async def whole(self, completion: Completion) -> bytes:
        reader = BlockReader()
        async for update in completion:
            for _event in reader.push(update.deltas):
                pass
        content = [content_block(block, completion.id) for block in reader.blocks]
        message = self._message(completion, content) | ending(completion)
        has_calls = any(block.call for block in reader.blocks)
        # Arguments that the model wrote may contain half of a surrogate pair, which only an escape can express.
        return json.dumps(message, separators=(",", ":")).encode() if has_calls else to_json(message)

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        reader = BlockReader()
        message = self._message(completion, []) | {"stop_reason": None, "stop_sequence": None}
        # The first tokens are there, so the beginning is sent with them.
        known = event("message_start", {"type": "message_start", "message": message})
        try:
            async for update in completion:
                known += block_events(reader.push(update.deltas), completion.id)
                if known:
                    yield known
                known = b""
        except ApiError as error:
            yield known + event("error", error.anthropic_body())
            return
        last = {"type": "message_delta", "delta": ending(completion), "usage": usage(completion)}
        end = event("message_delta", last) + event("message_stop", {"type": "message_stop"})
        yield known + block_events(reader.close(), completion.id) + end

    def _message(self, completion: Completion, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": completion.id, "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content, "usage": usage(completion)}


def block_events(changes: Iterable[BlockEvent], signature: str) -> bytes:
    pieces = [piece for change in changes for piece in change_events(change, signature)]
    return b"".join(event(piece["type"], piece) for piece in pieces)


def change_events(change: BlockEvent, signature: str) -> list[dict[str, Any]]:
    """The events of a change: the start of a block, a piece of it, or its end."""
    index = change.block.index
    if change.what == "open":
        start = empty_block(change.block)
        return [{"type": "content_block_start", "index": index, "content_block": start}]
    if change.what == "grow":
        return [block_delta(index, delta_of(change.block, change.text))]
    signed = [block_delta(index, {"type": "signature_delta", "signature": signature})]
    return [
        *(signed if change.block.kind == "reasoning" else []),
        {"type": "content_block_stop", "index": index},
    ]


def block_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def delta_of(block: Block, text: str) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case _:
            return {"type": "input_json_delta", "partial_json": text}


def empty_block(block: Block) -> dict[str, Any]:
    """A block as it is sent before its content."""
    if block.call is not None:
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": {}}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def content_block(block: Block, signature: str) -> dict[str, Any]:
    """A whole block. Clients drop thoughts without a signature, so they get one; nobody checks it."""
    empty = empty_block(block)
    if block.call is not None:
        return empty | {"input": json.loads(block.text)}
    return empty | ({"text": block.text} if block.kind == "text" else {"thinking": block.text, "signature": signature})


def ending(completion: Completion) -> dict[str, Any]:
    """Why the answer ended."""
    choice = completion.choices[0]
    if choice.parser.stop_string is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.parser.stop_string}
    return {"stop_reason": STOP_REASONS[choice.finish_reason or "stop"], "stop_sequence": None}


def usage(completion: Completion) -> dict[str, Any]:
    """Anthropic counts cached tokens apart."""
    counts = completion.usage()
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": counts["completion_tokens"],
    }

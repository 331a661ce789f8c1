"""The output items of the Responses API, and the events that build them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from openclaw_rl.api.wires.blocks import Block, BlockEvent

#: How the ids of items begin.
ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
#: Events about the text of items.
TEXT_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
ARGUMENTS = "response.function_call_arguments"

#: An event's type and body.
Piece = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ItemWriter:
    """Writes the items of one response."""

    suffix: str
    """What the ids of the response and its items have in common."""
    is_encrypted: bool
    """Whether the client keeps reasoning as `encrypted_content`, which it sends back as it is."""

    def item(self, block: Block, status: str = "") -> dict[str, Any]:
        """A block as an item: message, reasoning or function call; as far as it has grown."""
        head = {"id": self._id(block), "status": status or ("incomplete" if block.is_cut else "completed")}
        if block.call is not None:
            name, call_id = block.call.name, block.call.id
            return {"type": "function_call", **head, "call_id": call_id, "name": name, "arguments": block.text}
        content = [part(block)] if block.text else []
        if block.kind == "text":
            return {"type": "message", **head, "role": "assistant", "content": content}
        encrypted = block.text if self.is_encrypted else None
        return {"type": "reasoning", **head, "summary": [], "content": content, "encrypted_content": encrypted}

    def events(self, changes: Iterable[BlockEvent]) -> Iterator[Piece]:
        """The events of changes: an item is added, grows, or is done."""
        for change in changes:
            yield from self._events(change)

    def _events(self, change: BlockEvent) -> Iterator[Piece]:
        block = change.block
        if change.what == "open":
            yield from self._added(block)
        elif change.what == "close":
            yield from self._done(block)
        elif block.kind == "call":
            yield f"{ARGUMENTS}.delta", {**self._place(block), "delta": change.text}
        else:
            yield f"{TEXT_EVENTS[block.kind]}.delta", {**self._text_place(block), "delta": change.text}

    def _added(self, block: Block) -> Iterator[Piece]:
        yield "response.output_item.added", {"output_index": block.index, "item": self.item(block, "in_progress")}
        if block.kind != "call":
            yield "response.content_part.added", {**self._part_place(block), "part": part(block)}

    def _done(self, block: Block) -> Iterator[Piece]:
        if block.call is not None:
            whole = {"name": block.call.name, "arguments": block.text}
            yield f"{ARGUMENTS}.done", {**self._place(block), **whole}
        else:
            yield f"{TEXT_EVENTS[block.kind]}.done", {**self._text_place(block), "text": block.text}
            yield "response.content_part.done", {**self._part_place(block), "part": part(block)}
        yield "response.output_item.done", {"output_index": block.index, "item": self.item(block)}

    def _id(self, block: Block) -> str:
        return f"{ID_PREFIXES[block.kind]}{self.suffix}{block.index:04x}"

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index}

    def _part_place(self, block: Block) -> dict[str, Any]:
        return {**self._place(block), "content_index": 0}

    def _text_place(self, block: Block) -> dict[str, Any]:
        return self._part_place(block) | ({"logprobs": []} if block.kind == "text" else {})


def part(block: Block) -> dict[str, Any]:
    """The only content part of a message or of reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

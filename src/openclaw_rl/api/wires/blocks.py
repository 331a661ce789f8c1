"""A response as a list of blocks, which is how `/v1/messages` and `/v1/responses` see it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall


@dataclass(slots=True)
class Block:
    """Consecutive text, consecutive reasoning, or one tool call."""

    index: int
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    """Of a call: its arguments."""
    call: ParsedToolCall | None = None
    is_cut: bool = False
    """Whether the answer's limit ended it."""


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happened to a block. `text` is the new piece of a block that has grown."""

    what: Literal["open", "grow", "close"]
    block: Block
    text: str = ""


@dataclass(slots=True)
class BlockReader:
    """Groups the deltas of one choice into blocks.

    - A block is closed before the next one opens; blocks are numbered in the order in which they open.
    - The blocks do not depend on how text was cut into deltas.
    """

    blocks: list[Block] = field(default_factory=list)
    _is_open: bool = False

    def push(self, deltas: list[Delta]) -> Iterator[BlockEvent]:
        """Add the next deltas."""
        for delta in deltas:
            match delta:
                case ParsedToolCall():
                    yield from self._call(delta)
                case ReasoningText(text):
                    yield from self._grow("reasoning", text)
                case _:
                    yield from self._grow("text", delta)

    def close(self, is_cut: bool = False) -> Iterator[BlockEvent]:
        """End of the response, or of a block. `is_cut`: the answer's limit has been reached."""
        if self._is_open:
            self._is_open = False
            self.blocks[-1].is_cut = is_cut
            yield BlockEvent("close", self.blocks[-1])

    def _grow(self, kind: Literal["text", "reasoning"], text: str) -> Iterator[BlockEvent]:
        if not self._is_open or self.blocks[-1].kind != kind:
            yield from self._open(Block(len(self.blocks), kind))
        block = self.blocks[-1]
        block.text += text
        yield BlockEvent("grow", block, text)

    def _call(self, call: ParsedToolCall) -> Iterator[BlockEvent]:
        yield from self._open(Block(len(self.blocks), "call", call=call))
        block = self.blocks[-1]
        block.text = call.arguments
        yield BlockEvent("grow", block, call.arguments)
        yield from self.close()

    def _open(self, block: Block) -> Iterator[BlockEvent]:
        yield from self.close()
        self.blocks.append(block)
        self._is_open = True
        yield BlockEvent("open", block)

"""What wires have in common: the protocol, events, the way into a chat request, and a response as a list of blocks."""

from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import ValidationError
from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import CaptureFields, ChatRequest, TranslatedRequest, malformed
from openclaw_rl.rendering.chat import IMAGE_PART
from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall

#: The media type of server-sent events.
EVENTS = "text/event-stream"
#: Ends a stream of OpenAI's older wires.
DONE = b"data: [DONE]\n\n"
#: Some clients split lines at these characters too, so they are escaped. JSON allows it, and has them only in strings.
LINE_ENDS = [(char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029"]
#: Fields with the same meaning on every wire that has them.
SAME_FIELDS = (
    *CaptureFields.model_fields,
    *("model", "temperature", "top_p", "top_k", "seed", "stop", "n", "parallel_tool_calls"),
)


class Wire(Protocol):
    """One request as its client writes it, and its answer as the client reads it. A new object for each request."""

    id_prefix: str
    """How the ids of answers begin."""
    names: Mapping[str, str]
    """What the wire calls fields of a chat request, for errors."""
    media_type: str
    """What a streamed answer is."""

    def parse(self, body: bytes) -> ChatRequest:
        """Translate the request's body. Raises ApiError. May be called in a thread."""

    async def whole(self, completion: Completion) -> bytes:
        """The body of an answer that is not streamed."""

    def events(self, completion: Completion) -> AsyncIterator[bytes]:
        """The events of a streamed answer, each as soon as it is known. An error after the start is one of them."""


def data_event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event, as OpenAI's older wires write it. No character in it ends a line but its last two."""
    text = to_json(body)
    for line_end, escaped in () if text.isascii() else LINE_ENDS:
        text = text.replace(line_end, escaped)
    return b"data: " + text + b"\n\n"


def named_event(name: str, body: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + data_event(body)


def same_fields(request: CaptureFields) -> dict[str, Any]:
    """The fields of a request that a chat request has too, under the same name and with the same meaning."""
    return {name: getattr(request, name) for name in SAME_FIELDS if name in type(request).model_fields}


def refuse_fields(request: CaptureFields, refused: Mapping[str, str]) -> None:
    """Raise ApiError if a request has one of these fields; their values say what to do instead."""
    for name, advice in refused.items():
        if getattr(request, name):
            raise ApiError(400, f"{name} is not supported; {advice}.", param=name)


def chat_request(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    """The chat request with these messages, which have been checked, and these fields. Raises ApiError."""
    if not messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    try:
        return TranslatedRequest.model_validate({"translated": messages, **fields})
    except ValidationError as error:
        raise malformed(error) from None


def image_part(url: str) -> dict[str, Any]:
    """An image as a chat has it."""
    return {"type": IMAGE_PART, "image_url": {"url": url}}


def with_images(text: str, images: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: its text, and the images before it if there are any."""
    return [*images, *([{"type": "text", "text": text}] if text else [])] if images else text


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error for the field's name on another wire."""
    field, dot, rest = (error.param or "").partition(".")
    if field in names:
        error.param = names[field] + dot + rest
        error.message = error.message.replace(field, names[field])
    return error


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

"""Anthropic's Messages API: its requests as chat requests, and answers as one message or as a stream of events."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, WrapValidator, model_validator
from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import MAX_TEMPERATURE, CaptureFields, ChatRequest, KnownItems, ListOf, WireModel, parse
from openclaw_rl.api.wires.base import (
    EVENTS,
    Block,
    BlockEvent,
    BlockReader,
    chat_request,
    image_part,
    named_event,
    refuse_fields,
    same_fields,
    with_images,
)
from openclaw_rl.rendering.clients import CONTEXT, client_purpose

#: Anthropic's names of the chat fields that can be at fault.
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
}
#: Begins a line that Claude Code puts before its system prompt. It changes with every request, so with it no request
#: would begin like the one before.
ATTRIBUTION = "x-anthropic-billing-header:"
#: Fields that are refused, and what to do instead.
REFUSED = {"mcp_servers": "leave it out", "container": "leave it out"}
#: How a chat request says what `tool_choice` says.
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: How the Messages API says why an answer ended.
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesText(WireModel):
    type: Literal["text"]
    text: str


class ImageSource(WireModel):
    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class MessagesImage(WireModel):
    type: Literal["image"]
    source: ImageSource

    @property
    def chat_part(self) -> dict[str, Any]:
        source = self.source
        return image_part(source.url or f"data:{source.media_type};base64,{source.data}")


class MessagesThinking(WireModel):
    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class MessagesToolUse(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesToolResult(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ListOf[Annotated[MessagesText | MessagesImage, Field(discriminator="type")]] | None = None
    is_error: bool = False

    @property
    def chat_content(self) -> str | list[dict[str, Any]]:
        parts = self.content if isinstance(self.content, list) else ()
        images = [part.chat_part for part in parts if isinstance(part, MessagesImage)]
        text = joined(self.content)
        is_marked = text.lower().startswith(("error", "<error", "<tool_use_error"))
        return with_images(f"Error: {text}" if self.is_error and not is_marked else text, images)


ContentBlock = Annotated[
    MessagesText | MessagesImage | MessagesThinking | MessagesToolUse | MessagesToolResult,
    Field(discriminator="type"),
]


class MessagesMessage(WireModel):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[ContentBlock]

    @cached_property
    def chat_messages(self) -> list[dict[str, Any]]:
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        if self.role == "assistant":
            return [assistant_message(self.content)]
        return list(user_messages(self.role, self.content))


class MessagesTool(WireModel):
    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_the_clients(self) -> Self:
        if self.type not in (None, "custom"):
            raise ValueError(f"tools of type {self.type!r} are not supported, only tools with an input_schema")
        if self.input_schema is None:
            raise ValueError("a tool needs an input_schema")
        return self

    def chat_tool(self) -> dict[str, Any]:
        optional = {"description": self.description, "parameters": self.input_schema, "strict": self.strict}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **given}}


class MessagesToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise ValueError("a tool_choice of type 'tool' needs a name")
        return self

    @property
    def chat_choice(self) -> Any:
        named = {"type": "function", "function": {"name": self.name}}
        return named if self.type == "tool" else TOOL_CHOICES[self.type]


class ThinkingConfig(WireModel):
    type: str


class JsonFormat(WireModel):
    type: Literal["json_schema"]
    # `schema` is a method of pydantic's models.
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    format: JsonFormat | None = None


class RequestMetadata(WireModel):
    user_id: str | None = None


class MessagesRequest(CaptureFields):
    """The body of POST /v1/messages and of POST /v1/messages/count_tokens."""

    model_config = ConfigDict(strict=True)

    messages: Annotated[ListOf[MessagesMessage], Field(min_length=1), WrapValidator(KnownItems())]
    model: str | None = None
    system: str | ListOf[MessagesText] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop_sequences: ListOf[str] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    tools: ListOf[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    metadata: RequestMetadata | None = None
    mcp_servers: Any = None
    container: Any = None


def parse_messages(body: bytes) -> ChatRequest:
    """Read a request of the Messages API; raises 400 for what is not supported."""
    request = parse(MessagesRequest, body)
    refuse_fields(request, REFUSED)
    if request.messages[-1].role == "assistant":
        message = "The last message must be the user's: the start of an answer cannot be given."
        raise ApiError(400, message, param="messages")
    choice, thinking = request.tool_choice, request.thinking
    return chat_request(
        **same_fields(request) | {"session_id": request.session_id or session_of(request.metadata)},
        messages=list(chat_messages(request)),
        stream=request.stream,
        tools=[tool.chat_tool() for tool in request.tools] if request.tools else None,
        tool_choice=choice.chat_choice if choice else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        stop=request.stop_sequences,
        max_completion_tokens=request.max_tokens,
        response_format=response_format(request.output_config),
        # Without a word about thinking, the template decides.
        chat_template_kwargs={"enable_thinking": thinking.type != "disabled"} if thinking else None,
    )


def chat_messages(request: MessagesRequest) -> Iterator[dict[str, Any]]:
    if system := system_prompt(request.system):
        yield {"role": "system", "content": system}
    for message in request.messages:
        yield from message.chat_messages


def system_prompt(system: str | list[MessagesText] | None) -> str:
    if isinstance(system, list):
        system = [block for block in system if not block.text.startswith(ATTRIBUTION)]
    elif system and system.startswith(ATTRIBUTION):
        system = system.partition("\n")[2].lstrip("\n")
    return joined(system, "\n\n")


def assistant_message(blocks: list[ContentBlock]) -> dict[str, Any]:
    """An answer that the client sends back. Its texts are joined as they were before they became blocks."""
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, MessagesThinking))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, MessagesToolUse)
    ]
    content = "".join(block.text for block in blocks if isinstance(block, MessagesText))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def user_messages(role: str, blocks: list[ContentBlock]) -> Iterator[dict[str, Any]]:
    """Results of tools, and what the client wrote by itself, as messages of their own; other texts between them as one.

    Claude Code puts its summary of the conversation, or its request for one, into the message of a person's words.
    """
    texts: list[str] = []
    images: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, MessagesImage):
            images.append(block.chat_part)
            continue
        if not isinstance(block, MessagesText | MessagesToolResult):
            raise ApiError(400, f"A {role}'s message cannot contain {block.type} blocks.", param="messages")
        is_alone = isinstance(block, MessagesToolResult) or client_purpose(block.text) not in (None, CONTEXT)
        if texts and is_alone:
            yield {"role": role, "content": with_images("\n".join(texts), images)}
            texts, images = [], []
        if isinstance(block, MessagesToolResult):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.chat_content}
        elif is_alone:
            yield {"role": role, "content": block.text}
        else:
            texts.append(block.text)
    if texts or images:
        yield {"role": role, "content": with_images("\n".join(texts), images)}


def joined(content: str | Sequence[MessagesText | MessagesImage] | None, separator: str = "\n") -> str:
    if isinstance(content, str):
        return content
    return separator.join(block.text for block in content or () if isinstance(block, MessagesText))


def response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    schema = {"name": "answer", "schema": config.format.json_schema, "strict": True}
    return {"type": "json_schema", "json_schema": schema}


def session_of(metadata: RequestMetadata | None) -> str | None:
    """The session that Claude Code writes into `metadata.user_id`: as JSON, or after `_session_` (before 2.1.78)."""
    text = (metadata.user_id if metadata else None) or ""
    try:
        named = json.loads(text).get("session_id")
    except (ValueError, AttributeError, RecursionError):
        named = text.rpartition("_session_")[2] if "_session_" in text else None
    return named if isinstance(named, str) else None


class MessagesWire:
    """Implements `Wire`. The streamed message and the whole one are made from the same blocks."""

    id_prefix = "msg_"
    names = NAMES
    media_type = EVENTS

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
        known = named_event("message_start", {"type": "message_start", "message": message})
        try:
            async for update in completion:
                known += block_events(reader.push(update.deltas), completion.id)
                if known:
                    yield known
                known = b""
        except ApiError as error:
            yield known + named_event("error", error.anthropic_body())
            return
        last = {"type": "message_delta", "delta": ending(completion), "usage": usage(completion)}
        end = named_event("message_delta", last) + named_event("message_stop", {"type": "message_stop"})
        yield known + block_events(reader.close(), completion.id) + end

    def _message(self, completion: Completion, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": completion.id, "type": "message", "role": "assistant", "model": self.model}
        return head | {"content": content, "usage": usage(completion)}


def block_events(changes: Iterable[BlockEvent], signature: str) -> bytes:
    pieces = [piece for change in changes for piece in change_events(change, signature)]
    return b"".join(named_event(piece["type"], piece) for piece in pieces)


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
    if choice.stop_string is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
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

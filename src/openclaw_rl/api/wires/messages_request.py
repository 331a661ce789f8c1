"""Requests of Anthropic's Messages API as chat requests."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import MAX_TEMPERATURE, CaptureFields, ChatRequest, ListOf, WireModel, parse
from openclaw_rl.api.wires.base import capture_fields, chat_request

#: Anthropic's names of the chat fields that can be at fault.
NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
}
#: Begins a line that Claude Code puts before its system prompt. It changes with every request, so with it no request
#: would begin like the one before.
ATTRIBUTION = "x-anthropic-billing-header:"
#: How a chat request says what `tool_choice` says.
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesText(WireModel):
    type: Literal["text"]
    text: str


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
    content: str | ListOf[MessagesText] | None = None
    is_error: bool = False

    @property
    def text(self) -> str:
        text = joined(self.content)
        is_marked = text.lower().startswith(("error", "<error", "<tool_use_error"))
        return f"Error: {text}" if self.is_error and not is_marked else text


ContentBlock = Annotated[
    MessagesText | MessagesThinking | MessagesToolUse | MessagesToolResult, Field(discriminator="type")
]


class MessagesMessage(WireModel):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[ContentBlock]


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

    messages: ListOf[MessagesMessage] = Field(min_length=1)
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
    for field in ("mcp_servers", "container"):
        if getattr(request, field):
            raise ApiError(400, f"{field} is not supported; leave it out.", param=field)
    if request.messages[-1].role == "assistant":
        message = "The last message must be the user's: the start of an answer cannot be given."
        raise ApiError(400, message, param="messages")
    choice = request.tool_choice
    return chat_request(
        **capture_fields(request) | {"session_id": request.session_id or session_of(request.metadata)},
        messages=list(chat_messages(request)),
        model=request.model,
        stream=request.stream,
        tools=[tool.chat_tool() for tool in request.tools] if request.tools else None,
        tool_choice=choice.chat_choice if choice else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        max_completion_tokens=request.max_tokens,
        response_format=response_format(request.output_config),
        chat_template_kwargs=template_options(request.thinking),
    )


def chat_messages(request: MessagesRequest) -> Iterator[dict[str, Any]]:
    if system := system_prompt(request.system):
        yield {"role": "system", "content": system}
    for message in request.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield assistant_message(message.content)
        else:
            yield from user_messages(message.role, message.content)


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
    """Results of tools as messages of their own, the texts between them as one message each."""
    texts: list[str] = []
    for block in blocks:
        if isinstance(block, MessagesToolResult):
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
        elif isinstance(block, MessagesText):
            texts.append(block.text)
        else:
            raise ApiError(400, f"A {role}'s message cannot contain {block.type} blocks.", param="messages")
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def joined(content: str | list[MessagesText] | None, separator: str = "\n") -> str:
    return content or "" if not isinstance(content, list) else separator.join(block.text for block in content)


def template_options(thinking: ThinkingConfig | None) -> dict[str, Any] | None:
    """Without a word about thinking, the template decides."""
    return {"enable_thinking": thinking.type != "disabled"} if thinking else None


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

"""Requests of OpenAI's Responses API, and their input items, as chat requests."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, WrapValidator, field_validator, model_validator

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import (
    MAX_TEMPERATURE,
    CaptureFields,
    ChatRequest,
    KnownItems,
    ListOf,
    TextPart,
    WireModel,
    parse,
)
from openclaw_rl.api.wires.base import chat_request, image_part, refuse_fields, same_fields, with_images
from openclaw_rl.rendering.chat import Message

#: The Responses API's names of the chat fields that can be at fault.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
#: Fields that are refused, and what to do instead.
REFUSED = {
    "background": "wait for the answer, or stream it",
    "conversation": "use previous_response_id, or send the conversation",
    "prompt": "send instructions and input",
    "top_logprobs": "log-probs are available in /v1/chat/completions",
}
LOGPROBS = "message.output_text.logprobs"


class ItemText(WireModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ItemImage(WireModel):
    type: Literal["input_image"]
    image_url: str


ItemPart = Annotated[ItemText | ItemImage, Field(discriminator="type")]


class MessageItem(WireModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[ItemPart]

    @cached_property
    def chat_message(self) -> Message:
        if self.role == "assistant":
            return {"role": self.role, "content": joined(self.content, "")}
        # The role `system` is kept for instructions, which the next request may replace.
        role = "developer" if self.role == "system" else self.role
        return {"role": role, "content": chat_content(self.content)}


class FunctionCallItem(WireModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(WireModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[ItemPart]

    @cached_property
    def chat_message(self) -> Message:
        return {"role": "tool", "tool_call_id": self.call_id, "content": chat_content(self.output)}


class ReasoningItem(WireModel):
    type: Literal["reasoning"]
    content: ListOf[TextPart] | None = None
    encrypted_content: str | None = None
    """What the answer gave as such: the reasoning itself. Clients that keep nothing else send it back."""


InputItem = Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")]

#: Items that are parts of one answer.
AnswerItem = MessageItem | FunctionCallItem | ReasoningItem


def chat_messages(given: str | list[InputItem]) -> Iterator[Message]:
    """The messages of a chat. Consecutive items of the assistant become one message, as they were sampled."""
    if isinstance(given, str):
        yield {"role": "user", "content": given}
        return
    answer: list[AnswerItem] = []
    for item in given:
        if isinstance(item, FunctionOutputItem) or (isinstance(item, MessageItem) and item.role != "assistant"):
            if answer:
                yield assistant_message(answer)
                answer = []
            yield item.chat_message
        else:
            answer.append(item)
    if answer:
        yield assistant_message(answer)


def chat_content(content: str | Sequence[ItemText | ItemImage]) -> str | list[dict[str, Any]]:
    parts = () if isinstance(content, str) else content
    images = [image_part(part.image_url) for part in parts if isinstance(part, ItemImage)]
    return with_images(joined(content), images)


def assistant_message(items: list[AnswerItem]) -> Message:
    if len(items) == 1 and isinstance(items[0], MessageItem):
        return items[0].chat_message
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem():
                texts.append(item.chat_message["content"])
            case ReasoningItem():
                thoughts.append(joined(item.content or item.encrypted_content or "", ""))
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def joined(content: str | Sequence[ItemText | ItemImage | TextPart], separator: str = "\n") -> str:
    if isinstance(content, str):
        return content
    return separator.join(part.text for part in content if not isinstance(part, ItemImage))


class FunctionTool(WireModel):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _is_a_function(self) -> Self:
        if self.type != "function":
            raise ValueError(f"tools of type {self.type!r} are not supported, only functions")
        if not self.name:
            raise ValueError("a function needs a name")
        return self

    @cached_property
    def function(self) -> dict[str, Any]:
        """All that is said about it."""
        optional = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"name": self.name, **{name: value for name, value in optional.items() if value is not None}}


class TextFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = "answer"
    # `schema` is a method of pydantic's models.
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def chat_format(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.json_schema or {}, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextConfig(WireModel):
    format: TextFormat | None = None


class ReasoningConfig(WireModel):
    effort: str | None = None


class ResponsesRequest(CaptureFields):
    """The body of POST /v1/responses."""

    model_config = ConfigDict(strict=True)

    input: str | Annotated[ListOf[InputItem], WrapValidator(KnownItems())]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: Any = None

    @field_validator("input", mode="before")
    @classmethod
    def _with_types(cls, items: Any) -> Any:
        if isinstance(items, list) and any(isinstance(item, dict) and "type" not in item for item in items):
            # Messages may leave their type out.
            items = [
                {"type": "message", **item} if isinstance(item, dict) and "type" not in item else item for item in items
            ]
        return items


def parse_responses(body: bytes) -> ResponsesRequest:
    """Read a request of the Responses API; raises 400 for what is not supported."""
    request = parse(ResponsesRequest, body)
    refuse_fields(request, REFUSED)
    if LOGPROBS in (request.include or ()):
        raise ApiError(400, f"{LOGPROBS} is not supported; {REFUSED['top_logprobs']}.", param="include")
    return request


def translate(
    request: ResponsesRequest, earlier: Callable[[str], list[Message]], details: Mapping[str, Any]
) -> ChatRequest:
    """The chat request. `earlier` gives the conversation that ended with the response of an id.

    `details` are recorded with the answer.
    """
    messages = earlier(request.previous_response_id) if request.previous_response_id else []
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    effort = request.reasoning.effort if request.reasoning else None
    text = request.text.format if request.text else None
    return chat_request(
        **same_fields(request),
        messages=[*messages, *chat_messages(request.input)],
        stream=bool(request.stream),
        tools=[{"type": "function", "function": tool.function} for tool in request.tools or ()] or None,
        tool_choice=chat_choice(request.tool_choice),
        max_completion_tokens=request.max_output_tokens,
        response_format=text.chat_format() if text else None,
        chat_template_kwargs={"enable_thinking": effort != "none"} if effort else None,
        reasoning_effort=effort,
        details=details,
    )


def chat_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ApiError(400, "tool_choice must be a word or name a function.", param="tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}

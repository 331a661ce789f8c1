"""The input items of the Responses API as chat messages."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from openclaw_rl.api.wire import ListOf, TextPart, WireModel


class ItemText(WireModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(WireModel):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[ItemText]


class FunctionCallItem(WireModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(WireModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[ItemText]


class ReasoningItem(WireModel):
    type: Literal["reasoning"]
    content: ListOf[TextPart] | None = None
    encrypted_content: str | None = None
    """What the answer gave as such: the reasoning itself. Clients that keep nothing else send it back."""


InputItem = Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")]

#: Items that are parts of one answer.
AnswerItem = MessageItem | FunctionCallItem | ReasoningItem


def chat_messages(given: str | list[InputItem]) -> Iterator[dict[str, Any]]:
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
            yield other_message(item)
        else:
            answer.append(item)
    if answer:
        yield assistant_message(answer)


def other_message(item: FunctionOutputItem | MessageItem) -> dict[str, Any]:
    if isinstance(item, FunctionOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)}
    # The role `system` is kept for instructions, which the next request may replace.
    role = "developer" if item.role == "system" else item.role
    return {"role": role, "content": joined(item.content)}


def assistant_message(items: list[AnswerItem]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for item in items:
        match item:
            case MessageItem():
                texts.append(joined(item.content, ""))
            case ReasoningItem():
                thoughts.append(joined(item.content or item.encrypted_content or "", ""))
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls.append({"id": item.call_id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def joined(content: str | Sequence[ItemText | TextPart], separator: str = "\n") -> str:
    if isinstance(content, str):
        return content
    return content[0].text if len(content) == 1 else separator.join(part.text for part in content)

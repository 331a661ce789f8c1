"""An assistant message as OpenAI writes it."""

from typing import Any

from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall


class AssistantMessage:
    """Assembles an assistant message from the deltas of a response."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedToolCall] = []

    def add(self, delta: Delta) -> None:
        match delta:
            case str():
                self._content.append(delta)
            case ReasoningText(text):
                self._reasoning.append(text)
            case ParsedToolCall():
                self._calls.append(delta)

    def body(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [tool_call(call) for call in self._calls]
        return message


def tool_call(call: ParsedToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

"""An assistant message as OpenAI writes it."""

from typing import Any

from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall

#: Consecutive text or reasoning and its number of characters, or consecutive calls and their number.
Piece = tuple[str, int]
USUAL_ORDER = ("reasoning", "text", "call")


class AssistantMessage:
    """Assembles an assistant message from the deltas of a response."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ParsedToolCall] = []
        self._pieces: list[Piece] = []

    def add(self, delta: Delta) -> None:
        match delta:
            case str():
                self._content.append(delta)
                self._note("text", len(delta))
            case ReasoningText(text):
                self._reasoning.append(text)
                self._note("reasoning", len(text))
            case ParsedToolCall():
                self._calls.append(delta)
                self._note("call", 1)

    def _note(self, kind: str, length: int) -> None:
        if self._pieces and self._pieces[-1][0] == kind:
            length += self._pieces.pop()[1]
        self._pieces.append((kind, length))

    @property
    def order(self) -> list[Piece] | None:
        """In which order text, reasoning and calls came; None if each came once, and in the usual order."""
        kinds = [kind for kind, _length in self._pieces]
        return None if kinds == [kind for kind in USUAL_ORDER if kind in kinds] else self._pieces

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

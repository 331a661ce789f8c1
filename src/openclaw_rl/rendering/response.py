"""From sampled tokens to text, reasoning and tool calls, each as soon as it is certain; and from these to a message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.rendering.reasoning import THINK, Channels, Thoughts, WholeText, prefix_at_end
from openclaw_rl.rendering.tokenizer import Detokenizer
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning."""

    text: str


#: A piece of content, a piece of reasoning, or a whole tool call.
Delta = str | ReasoningText | ParsedToolCall
#: Consecutive text or reasoning and its number of characters, or consecutive calls and their number.
Piece = tuple[str, int]
USUAL_ORDER = ("reasoning", "text", "call")


class StopMatcher:
    """Passes text on until one of the stop strings appears; the stop string itself is not passed on.

    - A stop string ends the text also if it begins or ends in the middle of a token.
    - The result does not depend on how the text was cut into pieces.
    - Only text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared; `found` is the one."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Add the next piece; return the text that is certainly before any stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # The stop string that is complete first wins, even if a longer one begins earlier.
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            _end, start, self.found = min(matches)
            self._held = ""
            return text[:start]
        certain = len(text) - max(prefix_at_end(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """End of the text: return what was held back."""
        held = self._held
        self._held = ""
        return held


class ResponseParser:
    """Reads one completion. The result does not depend on how its tokens were grouped."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        opens_reasoning: bool = False,
        tools: ToolParser | None = None,
        *,
        reasoning: Thoughts | Channels | None = THINK,
        one_call: bool = False,
    ) -> None:
        """`reasoning`: how it is marked; None if all is content. `one_call`: the response ends with its first call."""
        self._decoder = detokenizer.stream()
        self._stops = StopMatcher(stops)
        self._splitter = WholeText() if reasoning is None else reasoning.splitter(opens_reasoning)
        self._tools = tools
        self._one_call = one_call
        self._may_stop = one_call or bool(stops)
        self.called_tools = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string or the only call has appeared; later tokens are ignored."""
        return self._stops.stopped or self._has_its_call

    @property
    def _has_its_call(self) -> bool:
        return self._one_call and self.called_tools

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the response, if one did."""
        return self._stops.found

    def push(self, token_ids: Sequence[int]) -> tuple[int, list[Delta]]:
        """Add tokens up to the one that stops the response; return how many were added, and what is certain now."""
        if not self._may_stop:
            return len(token_ids), self._read(self._decoder.push(token_ids))
        taken = 0
        text = ""
        deltas: list[Delta] = []
        for token_id in token_ids:
            taken += 1
            text += self._stops.push(self._decoder.push([token_id]))
            if self._one_call:
                deltas += self._read(text)
                text = ""
            if self.stopped:
                break
        return taken, deltas + self._read(text)

    def flush(self) -> list[Delta]:
        """End of the completion: return what was held back."""
        if self._has_its_call:
            return []
        text = self._stops.push(self._decoder.flush())
        deltas = self._read(text + self._stops.flush())
        for channel, piece in self._splitter.flush():
            deltas += [ReasoningText(piece)] if channel == "reasoning" else self._content(piece)
        if self._tools is not None:
            deltas += self._note_calls(self._tools.flush())
        return deltas

    def _read(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if text:
            for channel, piece in self._splitter.push(text):
                deltas += [ReasoningText(piece)] if channel == "reasoning" else self._content(piece)
        return deltas

    def _content(self, text: str) -> Sequence[Delta]:
        return [text] if self._tools is None else self._note_calls(self._tools.push(text))

    def _note_calls(self, parsed: list[str | ParsedToolCall]) -> Sequence[Delta]:
        first = next((place for place, item in enumerate(parsed) if isinstance(item, ParsedToolCall)), None)
        self.called_tools = self.called_tools or first is not None
        return parsed if first is None or not self._one_call else parsed[: first + 1]


class AssistantMessage:
    """Assembles an assistant message, as OpenAI writes it, from the deltas of a response."""

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

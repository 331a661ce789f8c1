"""From sampled tokens to text, reasoning and tool calls, each as soon as it is certain."""

from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.rendering.detokenize import Detokenizer
from openclaw_rl.rendering.reasoning import ReasoningSplitter, WholeText
from openclaw_rl.rendering.stops import StopMatcher
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's reasoning."""

    text: str


#: A piece of content, a piece of reasoning, or a whole tool call.
Delta = str | ReasoningText | ParsedToolCall


class ResponseParser:
    """Reads one completion. The result does not depend on how its tokens were grouped."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        opens_reasoning: bool = False,
        tools: ToolParser | None = None,
        *,
        splits_reasoning: bool = True,
        one_call: bool = False,
    ) -> None:
        """`one_call`: the response ends with its first tool call."""
        self._decoder = detokenizer.stream()
        self._stops = StopMatcher(stops)
        self._splitter = ReasoningSplitter(starts_inside=opens_reasoning) if splits_reasoning else WholeText()
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
        taken, text = 0, ""
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

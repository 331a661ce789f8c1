"""From sampled tokens to what a client reads: text, reasoning and tool calls, as soon as each is certain."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openclaw_rl.rendering.detokenize import Detokenizer
from openclaw_rl.rendering.reasoning import ReasoningSplitter
from openclaw_rl.rendering.stops import StopMatcher
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the model's thoughts."""

    text: str


#: A piece of content, a piece of reasoning, or a whole tool call.
Delta = str | ReasoningText | ParsedToolCall


class ResponseParser:
    """Reads one completion. Nothing it returns depends on how tokens were grouped on their way here."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        opens_reasoning: bool = False,
        tools: ToolParser | None = None,
    ) -> None:
        self._decoder = detokenizer.stream()
        self._stops = StopMatcher(stops)
        self._splitter = ReasoningSplitter(starts_inside=opens_reasoning)
        self._tools = tools
        self.called_tools = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared: no further token matters."""
        return self._stops.stopped

    def push(self, token_ids: Iterable[int]) -> tuple[int, list[Delta]]:
        """Take tokens up to a stop string; return how many were taken and what is certain now."""
        taken, text = 0, ""
        for token_id in token_ids:
            taken += 1
            text += self._stops.push(self._decoder.push(token_id))
            if self.stopped:
                break
        return taken, self._read(text)

    def flush(self) -> list[Delta]:
        """The completion is over: return all that was held back."""
        text = self._stops.push(self._decoder.flush())
        deltas = self._read(text + self._stops.flush())
        for channel, piece in self._splitter.flush():
            deltas += [ReasoningText(piece)] if channel == "reasoning" else self._content(piece)
        if self._tools is not None:
            deltas += self._note(self._tools.flush())
        return deltas

    def _read(self, text: str) -> list[Delta]:
        deltas: list[Delta] = []
        if text:
            for channel, piece in self._splitter.push(text):
                deltas += [ReasoningText(piece)] if channel == "reasoning" else self._content(piece)
        return deltas

    def _content(self, text: str) -> Sequence[Delta]:
        return [text] if self._tools is None else self._note(self._tools.push(text))

    def _note(self, found: list[str | ParsedToolCall]) -> Sequence[Delta]:
        self.called_tools = self.called_tools or any(isinstance(item, ParsedToolCall) for item in found)
        return found

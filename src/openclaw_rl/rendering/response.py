"""From sampled tokens to text, reasoning and tool calls, each as soon as it is certain; and from these to a message.

A model's family says how it marks its reasoning.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from openclaw_rl.rendering.tokenizer import Detokenizer
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser, prefix_at_end

Channel = Literal["reasoning", "content"]
ChannelText = tuple[Channel, str]


class Splitter(Protocol):
    """Reads one response. The text of each channel does not depend on how the response was cut into pieces."""

    def push(self, text: str) -> list[ChannelText]:
        """Add the next piece of the response; return what has become certain. No returned piece is empty."""

    def flush(self) -> list[ChannelText]:
        """End of the response: return what was held back."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The marks around reasoning at the beginning of a response."""

    opening: str
    closing: str
    before_content: str = ""
    """What stands before an answer without reasoning."""

    @property
    def markers(self) -> frozenset[str]:
        """The texts that must be visible if they are control tokens."""
        return frozenset({self.opening.strip(), self.closing} | set(re.findall(r"<\|\w+>", self.opening)))

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside of reasoning."""
        return prompt.rstrip().endswith(self.opening.rstrip())

    def ended_by(self, prompt: str) -> bool:
        """Whether a prompt ends with reasoning."""
        return prompt.rstrip().endswith(self.closing)

    def splitter(self, starts_inside: bool) -> Splitter:
        return ReasoningSplitter(self, starts_inside)


class Channels:
    """The channels of gpt-oss (harmony). A response is messages, whose headers name their channel."""

    markers = frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"})
    before_content = "<|channel|>final<|message|>"

    def opened_by(self, prompt: str) -> bool:
        return False

    def ended_by(self, prompt: str) -> bool:
        return False

    def splitter(self, starts_inside: bool) -> Splitter:
        return ChannelSplitter()


THINK = Thoughts("<think>", "</think>")
CHANNELS = Channels()
#: By a sign in the chat template, the first that fits.
BY_SIGN: tuple[tuple[str, Thoughts | Channels], ...] = (
    ("<|channel|>analysis<|message|>", CHANNELS),
    ("<|channel>thought", Thoughts("<|channel>thought\n", "<channel|>")),
    ("[THINK]", Thoughts("[THINK]", "[/THINK]")),
)


def reasoning_of(template: str) -> Thoughts | Channels:
    """How a model with this chat template marks its reasoning; with the usual tags if the template does not say."""
    return next((marks for sign, marks in BY_SIGN if sign in template), THINK)


class ReasoningSplitter:
    """Splits a block of reasoning, such as `<think>…</think>`, off the beginning of a streaming response.

    Takes the text in pieces of any size; returns the same text, each piece labelled with its channel, without the tags
    and the whitespace around them.

    `starts_inside` says that the prompt has already opened the block.

    - Only a block at the very beginning (after whitespace) is reasoning. Anywhere else the tags are content.
    - A response without the block is returned byte for byte.
    - If the block is never closed, the whole response is reasoning.
    - Only text that may be part of a tag is held back, and whitespace that a tag would remove.
    """

    def __init__(self, marks: Thoughts = THINK, starts_inside: bool = False) -> None:
        self._opening = marks.opening
        self._closing = marks.closing
        self._read = self._enter_block if starts_inside else self._begin
        self._held = ""

    def push(self, text: str) -> list[ChannelText]:
        held = self._held
        self._held = ""
        return self._read(held + text)

    def flush(self) -> list[ChannelText]:
        held = self._held
        self._held = ""
        if self._read == self._begin:
            return _on_channel("content", held)
        return _on_channel("reasoning", held) if self._read == self._in_block else []

    def _begin(self, text: str) -> list[ChannelText]:
        start = text.lstrip()
        if start.startswith(self._opening):
            return self._enter_block(start.removeprefix(self._opening))
        if self._opening.startswith(start):
            self._held = text
            return []
        return self._in_content(text)

    def _enter_block(self, text: str) -> list[ChannelText]:
        self._read = self._enter_block
        text = text.lstrip()
        return self._in_block(text) if text else []

    def _in_block(self, text: str) -> list[ChannelText]:
        self._read = self._in_block
        thought, closed, rest = text.partition(self._closing)
        if closed:
            return _on_channel("reasoning", thought.rstrip()) + self._leave_block(rest)
        settled = text[: len(text) - prefix_at_end(text, self._closing)].rstrip()
        self._held = text[len(settled) :]
        return _on_channel("reasoning", settled)

    def _leave_block(self, text: str) -> list[ChannelText]:
        self._read = self._leave_block
        text = text.lstrip()
        return self._in_content(text) if text else []

    def _in_content(self, text: str) -> list[ChannelText]:
        self._read = self._in_content
        return _on_channel("content", text)


#: What ends the body of a message in harmony; the last two also begin the next header.
_BODY_ENDS = ("<|end|>", "<|call|>", "<|start|>", "<|channel|>")
_HEADER_STARTS = ("<|start|>", "<|channel|>", " to=", "to=")
_MESSAGE = "<|message|>"
_TO = r"(?: ?to=[^\s<]+)?"
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant)?(?P<said>{_TO}"
    rf"(?:<\|channel\|>(?P<channel>\w+){_TO}(?: ?<\|constrain\|>\w+| json| code)?)?)<\|message\|>"
)
_MAX_HEADER = 256
#: Between two messages of one channel.
_GAP = "\n\n"


class ChannelSplitter:
    """Splits the messages of a harmony response: `analysis` is reasoning, everything else content.

    - Messages to a recipient, such as tool calls, are content with their headers, so that calls can be read from them.
    - What is not in a message is content.
    """

    def __init__(self) -> None:
        self._text = ""
        self._in_header = True
        self._channel: Channel = "content"
        self._is_call = False
        self._begun: set[Channel] = set()
        self._gap = False  # whether the next text of the message comes after another message of its channel

    def push(self, text: str) -> list[ChannelText]:
        self._text += text
        return self._read(final=False)

    def flush(self) -> list[ChannelText]:
        return self._read(final=True)

    def _read(self, final: bool) -> list[ChannelText]:
        out: list[ChannelText] = []
        while self._text:
            step = self._read_header(final) if self._in_header else self._read_body(final)
            if step is None:
                break
            out += step
        return out

    def _read_header(self, final: bool) -> list[ChannelText] | None:
        """Read a header; None if that needs more of the response. What is no header is content."""
        text = self._text
        begins = text.startswith(_HEADER_STARTS)
        if not begins and not final and any(start.startswith(text) for start in _HEADER_STARTS):
            return None
        end = text.find(_MESSAGE, 0, _MAX_HEADER)
        is_open = begins and end < 0 and "\n" not in text and len(text) < _MAX_HEADER
        if is_open and not final:
            return None
        header = _HEADER.fullmatch(text, 0, end + len(_MESSAGE)) if begins and end >= 0 else None
        self._in_header = False
        if header is None:
            self._begin_message("content", is_call=False)
            start = next((each for each in ("<|start|>", "<|channel|>") if text.startswith(each)), "")
            self._text = text[len(start) :]
            return self._say(start)
        is_call = "to=" in header["said"]
        self._begin_message("reasoning" if header["channel"] == "analysis" and not is_call else "content", is_call)
        self._text = text[header.end() :]
        return self._say(header["said"] + _MESSAGE if is_call else "")

    def _begin_message(self, channel: Channel, is_call: bool) -> None:
        self._channel = channel
        self._is_call = is_call
        self._gap = channel in self._begun and not is_call

    def _read_body(self, final: bool) -> list[ChannelText] | None:
        """Pass on a message's text; None if all of it may be the beginning of a mark."""
        text = self._text
        ends = [(at, mark) for mark in _BODY_ENDS if (at := text.find(mark)) >= 0]
        if not ends:
            held = 0 if final else max(prefix_at_end(text, mark) for mark in _BODY_ENDS)
            self._text = text[len(text) - held :]
            return self._say(text[: len(text) - held]) if len(text) > held else None
        at, mark = min(ends)
        closes = mark in ("<|end|>", "<|call|>")
        self._text = text[at + len(mark) if closes else at :]
        self._in_header = True
        # The end of a call is part of the call.
        return self._say(text[:at] + (mark if closes and self._is_call else ""))

    def _say(self, text: str) -> list[ChannelText]:
        if not text:
            return []
        gap = _GAP if self._gap else ""
        self._gap = False
        if not self._is_call:
            self._begun.add(self._channel)
        return [(self._channel, gap + text)]


class WholeText:
    """In the place of a `ReasoningSplitter`, for responses in which the tags mean nothing: all of it is content."""

    def push(self, text: str) -> list[ChannelText]:
        return _on_channel("content", text)

    def flush(self) -> list[ChannelText]:
        return []


def _on_channel(channel: Channel, text: str) -> list[ChannelText]:
    return [(channel, text)] if text else []


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

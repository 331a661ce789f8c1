"""Finds tool calls in a response's content.

Takes content in pieces of any size; returns text and complete calls, in order. What is not a well-formed call stays
text, byte for byte: nothing is repaired and nothing is lost.
"""

import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.rendering.call_bodies import (
    BlockDraft,
    GrowingText,
    NotACall,
    Part,
    Reading,
    WrittenCall,
    after_space,
    ends_here,
)


@dataclass(frozen=True)
class ParsedToolCall:
    """A call in a response. `arguments` is a JSON object, exactly as the model wrote it if it wrote JSON."""

    id: str
    name: str
    arguments: str


_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 24  # over 140 random bits, so that ids are unique


def new_call_id() -> str:
    """A new id. It is alphanumeric, because some clients refuse other characters."""
    return "call" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls: a block is an opening, the parts of a body, and the closing.

    Whitespace may stand between them.
    """

    openings: tuple[str, ...]
    """A block begins with one of these."""
    bodies: tuple[tuple[Part, ...], ...]
    """What may follow, the first that fits."""
    closing: str = ""
    """Ends a block, as the end of the response does; empty if a block ends with its body."""
    dropped: tuple[str, ...] = ()
    """What may follow a block and means nothing."""
    fills_answer: bool = False
    """Whether calls are the whole answer. Then a block has no opening that is not part of a call."""
    markers: tuple[str, ...] = ()
    """Texts besides these that are single tokens in the family's vocabulary."""

    @property
    def all_markers(self) -> frozenset[str]:
        """The texts that must be visible if they are control tokens."""
        return frozenset(filter(None, (*self.openings, self.closing, *self.dropped, *self.markers)))


def read_block(
    format: ToolFormat, source: GrowingText, at: int, schemas: Mapping[str, Any]
) -> Reading[tuple[list[WrittenCall], int]]:
    """The calls of a block after its opening, and where the block ends. Raises NotACall."""
    for body in format.bodies:
        draft = BlockDraft(schemas)
        position = at
        try:
            for part in body:
                position = yield from after_space(source, position)
                position = yield from part(source, position, draft)
            if format.closing:
                position = yield from after_space(source, position)
                closed = yield from ends_here(source, position, (format.closing,))
                if closed is None:
                    raise NotACall
                position = closed
        except NotACall:
            continue
        return draft.calls, position
    raise NotACall


class ToolParser:
    """Reads one response. The result, adjacent texts joined, does not depend on how the response was cut.

    - A block that is no call is text: its opening is passed on, and parsing continues after it.
    - Text is passed on unchanged as soon as it is certain that it is no call, except that text next to a call is
      dropped if it is only whitespace.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[Mapping[str, Any]] = (),
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`tools` are those that the request offers: their schemas tell strings from other values."""
        functions = [tool["function"] for tool in tools]
        self._schemas = {function["name"]: function.get("parameters") for function in functions}
        self._format = format
        self._new_id = new_id
        self._source = GrowingText()
        self._block: Reading[tuple[list[WrittenCall], int]] | None = None
        self._blank = ""  # the text since the last call, while it is only whitespace
        self._in_text = False
        self._after_call = False
        self._ids: set[str] = set()

    def push(self, text: str) -> list[str | ParsedToolCall]:
        """Add the next piece of content; return what has become certain."""
        self._source.text += text
        return self._read()

    def flush(self) -> list[str | ParsedToolCall]:
        """End of the response: return what was held back, as calls or text."""
        self._source.final = True
        out = self._read()
        return [*out, self._blank] if self._blank and not self._after_call else out

    def _read(self) -> list[str | ParsedToolCall]:
        out: list[str | ParsedToolCall] = []
        while self._source.text:
            step = self._step()
            if step is None:
                break
            out += step
        return out

    def _step(self) -> Sequence[str | ParsedToolCall] | None:
        """What the beginning of the text is; None if that needs more of the response."""
        if self._format.fills_answer and (self._in_text or self._after_call):
            return self._pass_on(len(self._source.text))
        if self._block is None and self._format.fills_answer:
            space = len(self._source.text) - len(self._source.text.lstrip())
            if space:
                return self._pass_on(space)
        if self._after_call and not self._in_text and (length := self._droppable()) != 0:
            return None if length is None else self._drop(length)
        opening = next((each for each in self._format.openings if self._source.text.startswith(each)), None)
        if opening is None or (not opening and self._may_open()):
            return self._pass_text()
        return self._read_block(opening)

    def _may_open(self) -> bool:
        """Whether the text may still become an opening."""
        text = self._source.text
        return not self._source.final and any(each and each.startswith(text) for each in self._format.openings)

    def _read_block(self, opening: str) -> Sequence[str | ParsedToolCall] | None:
        if self._block is None:
            self._block = read_block(self._format, self._source, len(opening), self._schemas)
        try:
            next(self._block)
        except NotACall:
            return self._pass_on(len(opening) or len(self._source.text))
        except StopIteration as read:
            calls, end = read.value
            self._take(end)
            self._blank = ""
            self._in_text = False
            self._after_call = True
            return [ParsedToolCall(self._id(call), call.name, call.arguments) for call in calls]
        return None

    def _id(self, call: WrittenCall) -> str:
        """The id that the model gave a call, if no other call has it; otherwise a new one."""
        id = call.id if call.id is not None and call.id not in self._ids else self._new_id()
        self._ids.add(id)
        return id

    def _droppable(self) -> int | None:
        """How much of the text means nothing after a call; None if that needs more of the response."""
        text = self._source.text
        start = len(text) - len(text.lstrip())
        rest = text[start:]
        found = next((each for each in self._format.dropped if rest.startswith(each)), None)
        if found is not None:
            return start + len(found)
        undecided = not self._source.final and any(each.startswith(rest) for each in self._format.dropped)
        return None if undecided else 0

    def _pass_text(self) -> Sequence[str] | None:
        """Pass on the text before the next opening; None if all of it may be the beginning of one."""
        text = self._source.text
        openings = [each for each in self._format.openings if each]
        starts = [] if self._format.fills_answer else [at for each in openings if (at := text.find(each)) >= 0]
        held = 0 if self._source.final else max(prefix_at_end(text, each) for each in openings)
        end = min(starts, default=len(text) - held)
        return self._pass_on(end) if end else None

    def _drop(self, length: int) -> Sequence[str]:
        self._take(length)
        self._blank = ""
        return []

    def _pass_on(self, length: int) -> Sequence[str]:
        text = self._blank + self._take(length)
        self._in_text = self._in_text or not text.isspace()
        self._blank = "" if self._in_text else text
        return [text] if self._in_text else []

    def _take(self, length: int) -> str:
        text = self._source.text
        self._source = GrowingText(text[length:], self._source.final)
        self._block = None
        return text[:length]


def prefix_at_end(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a beginning of `mark`, but not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)

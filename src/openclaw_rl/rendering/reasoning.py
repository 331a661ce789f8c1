"""Separates a response's reasoning from its content.

Takes the text of one response in pieces of any size; returns the same text, each piece labelled with its channel,
without the tags and the whitespace around them.
"""

from typing import Literal

Channel = Literal["reasoning", "content"]
Piece = tuple[Channel, str]

_OPEN = "<think>"
_CLOSE = "</think>"


class ReasoningSplitter:
    """Splits a `<think>…</think>` block off the beginning of a streaming response.

    `starts_inside` says that the prompt has already opened the block.

    - Only a block at the very beginning (after whitespace) is reasoning. Anywhere else the tags are content.
    - A response without the block is returned byte for byte.
    - If the block is never closed, the whole response is reasoning.
    - The text of each channel does not depend on how the response was cut into pieces.
    - Only text that may be part of a tag is held back, and whitespace that a tag would remove.
    """

    def __init__(self, starts_inside: bool = False) -> None:
        self._read = self._enter_block if starts_inside else self._begin
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """Add the next piece of the response; return what has become certain. No returned piece is empty."""
        held, self._held = self._held, ""
        return self._read(held + text)

    def flush(self) -> list[Piece]:
        """End of the response: return what was held back and is not a tag."""
        held, self._held = self._held, ""
        if self._read == self._begin:
            return _piece("content", held)
        return _piece("reasoning", held) if self._read == self._in_block else []

    def _begin(self, text: str) -> list[Piece]:
        start = text.lstrip()
        if start.startswith(_OPEN):
            return self._enter_block(start.removeprefix(_OPEN))
        if _OPEN.startswith(start):
            self._held = text
            return []
        return self._in_content(text)

    def _enter_block(self, text: str) -> list[Piece]:
        self._read = self._enter_block
        text = text.lstrip()
        return self._in_block(text) if text else []

    def _in_block(self, text: str) -> list[Piece]:
        self._read = self._in_block
        thought, closed, rest = text.partition(_CLOSE)
        if closed:
            return _piece("reasoning", thought.rstrip()) + self._leave_block(rest)
        settled = text[: len(text) - _tag_begun(text)].rstrip()
        self._held = text[len(settled) :]
        return _piece("reasoning", settled)

    def _leave_block(self, text: str) -> list[Piece]:
        self._read = self._leave_block
        text = text.lstrip()
        return self._in_content(text) if text else []

    def _in_content(self, text: str) -> list[Piece]:
        self._read = self._in_content
        return _piece("content", text)


class WholeText:
    """In the place of a `ReasoningSplitter`, for responses in which the tags mean nothing: all of it is content."""

    def push(self, text: str) -> list[Piece]:
        return _piece("content", text)

    def flush(self) -> list[Piece]:
        return []


def _piece(channel: Channel, text: str) -> list[Piece]:
    return [(channel, text)] if text else []


def _tag_begun(text: str) -> int:
    """How many characters at the end of `text` could be the beginning of the closing tag."""
    return next((n for n in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:n])), 0)

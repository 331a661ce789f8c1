"""Finds tool calls in a response's content.

Takes content in pieces of any size; returns text and complete calls, in order. What is not a well-formed call stays
text, byte for byte: nothing is repaired and nothing is lost.
"""

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, Protocol


@dataclass(frozen=True)
class ParsedToolCall:
    """A call in a response. `arguments` is a JSON object exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


class ToolParser(Protocol):
    """Reads one response. The result, adjacent texts joined, does not depend on how the response was cut."""

    def push(self, text: str) -> list[str | ParsedToolCall]:
        """Add the next piece of content; return what has become certain."""

    def flush(self) -> list[str | ParsedToolCall]:
        """End of the response: return what was held back, as calls or text."""


_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 24  # over 140 random bits, so that ids are unique


def new_call_id() -> str:
    """A new id. It is alphanumeric, because some clients refuse other characters."""
    return "call" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))


_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


class HermesToolParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere and any number of times.

    A block begins with the tag and a brace. It ends at the first character that is not possible in JSON: a `<` outside
    a string, or a line break inside one. So an argument may contain tags, and a missing quote affects only its line.
    If the closing tag or the end of the response follows, and the block is one call, it is returned as a call.
    Otherwise the opening tag is text, and parsing continues after it.

    Text is passed on unchanged, except that text next to a call is dropped if it is only whitespace.
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._buffer = ""
        self._edge = _JsonEdge(len(_OPEN))
        self._blank = ""  # the text since the last call, while it is only whitespace
        self._in_text = False
        self._after_call = False

    def push(self, text: str) -> list[str | ParsedToolCall]:
        self._buffer += text
        return self._read(final=False)

    def flush(self) -> list[str | ParsedToolCall]:
        out = self._read(final=True)
        return [*out, self._blank] if self._blank and not self._after_call else out

    def _read(self, final: bool) -> list[str | ParsedToolCall]:
        out: list[str | ParsedToolCall] = []
        while self._buffer:
            step = self._read_block(final) if self._buffer.startswith(_OPEN) else self._read_text(final)
            if step is None:
                break
            out += step
        return out

    def _read_text(self, final: bool) -> list[str | ParsedToolCall] | None:
        """Pass on the text before the next tag; None if all of it may be the beginning of a tag."""
        end = self._buffer.find(_OPEN)
        if end < 0:
            end = len(self._buffer) - (0 if final else _tag_begun(self._buffer))
        return self._pass_on(end) if end else None

    def _read_block(self, final: bool) -> list[str | ParsedToolCall] | None:
        """Read the block at the front of the buffer; None if that needs more of the response."""
        body = _skip_space(self._buffer, len(_OPEN))
        edge = self._edge.find(self._buffer) if self._buffer.startswith("{", body) else body
        tag = self._buffer[edge : edge + len(_CLOSE)]
        closed = _CLOSE.startswith(tag)
        if closed and tag != _CLOSE and not final:
            return None
        calls = _read_calls(self._buffer[body:edge], _END, default="{}") if closed else []
        if not calls:
            return self._pass_on(len(_OPEN))
        self._take(edge + len(tag))
        self._blank = ""
        self._in_text = False
        self._after_call = True
        return [ParsedToolCall(self._new_id(), *call) for call in calls]

    def _pass_on(self, length: int) -> list[str | ParsedToolCall]:
        text = self._blank + self._take(length)
        self._in_text = self._in_text or not text.isspace()
        self._blank = "" if self._in_text else text
        return [text] if self._in_text else []

    def _take(self, length: int) -> str:
        taken = self._buffer[:length]
        self._buffer = self._buffer[length:]
        self._edge = _JsonEdge(len(_OPEN))
        return taken


class LlamaToolParser:
    """Llama 3: the content is `{"name": …, "parameters": {…}}`, or several of these split by `;` or line breaks.

    Content that begins with a brace, after whitespace and perhaps `<|python_tag|>`, is held back until it ends; then
    either all of it is calls or all of it is text. Other content is passed on at once.
    """

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._held = ""
        self._is_text = False

    def push(self, text: str) -> list[str | ParsedToolCall]:
        self._held += text
        body = self._body()
        undecided = self._held.startswith("{", body) or _PYTHON_TAG.startswith(self._held[body:])
        self._is_text = self._is_text or not undecided
        return self._release() if self._is_text else []

    def flush(self) -> list[str | ParsedToolCall]:
        calls = _read_calls(self._held[self._body() :], _SEPARATOR_OR_END, default=None)
        return [ParsedToolCall(self._new_id(), *call) for call in calls] or self._release()

    def _body(self) -> int:
        start = _skip_space(self._held, 0)
        tagged = self._held.startswith(_PYTHON_TAG, start)
        return _skip_space(self._held, start + len(_PYTHON_TAG)) if tagged else start

    def _release(self) -> list[str | ParsedToolCall]:
        text = self._held
        self._held = ""
        return [text] if text else []


PARSERS: dict[str, type[HermesToolParser] | type[LlamaToolParser]] = {
    "hermes": HermesToolParser,
    "llama3": LlamaToolParser,
}

# The instruction for tool calls in Llama's templates that do not have the tag.
_LLAMA_INSTRUCTION = re.compile(r'"name":\s*[^",]+,\s*"parameters"')


def choose_parser(chat_template: str | None) -> str:
    """The key in `PARSERS` for the format that a chat template uses; Hermes, the most common, if it names none."""
    template = chat_template or ""
    llama = _PYTHON_TAG in template or _LLAMA_INSTRUCTION.search(template)
    return "llama3" if llama and _OPEN not in template else "hermes"


class _JsonEdge:
    """Finds where JSON must have ended, in one pass over a text that grows."""

    _MARK = re.compile(r'\\.|["<\n]')

    def __init__(self, start: int) -> None:
        self._position = start
        self._in_string = False

    def find(self, text: str) -> int:
        """The index of the first `<` outside a string or line break inside one; the length of the text if none."""
        for mark in self._MARK.finditer(text, self._position):
            self._position = mark.start()
            if mark[0] == ("\n" if self._in_string else "<"):
                return self._position
            self._position = mark.end()
            self._in_string ^= mark[0] == '"'
        # The character that a backslash at the very end escapes is still missing.
        self._position = max(self._position, len(text) - 1)
        return len(text)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)

# What may follow the JSON of a call: the end, or a separator and another call.
_END = re.compile(r"\s*\Z")
_SEPARATOR_OR_END = re.compile(r"\s*(?:[;\n]\s*|\Z)")


def _read_calls(text: str, gap: re.Pattern[str], default: str | None) -> list[tuple[str, str]]:
    """Calls as (name, arguments), each followed by `gap`; none unless they fill all of `text`.

    `default` replaces missing arguments; if it is None, a call without arguments is not a call.
    """
    calls = []
    position = 0
    try:
        while position < len(text):
            call, end = _JSON.raw_decode(text, position)
            calls.append(_name_and_arguments(call, text[position:end], default))
            separator = gap.match(text, end)
            if separator is None:
                return []
            position = separator.end()
    except (ValueError, RecursionError):  # the latter for deeply nested brackets
        return []
    return calls


def _name_and_arguments(call: object, source: str, default: str | None) -> tuple[str, str]:
    """The name and the arguments of a call, as they are written in `source`; raises ValueError if it is not a call."""
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name:
        raise ValueError("not an object with a name")
    key = "arguments" if "arguments" in call else "parameters"
    arguments = _member_source(source, key) if key in call else default
    if isinstance(encoded_twice := call.get(key), str):
        arguments = encoded_twice
    if arguments is None or not isinstance(_JSON.decode(arguments), dict):
        raise ValueError("arguments are not an object")
    (name + arguments).encode()  # half of a surrogate pair is valid JSON, but cannot be sent
    return name, arguments


def _member_source(source: str, wanted: str) -> str:
    """The text of a member's value in the text of a JSON object that has this member."""
    value = ""
    position = 0
    while source[position] != "}":
        key, end = _JSON.raw_decode(source, _skip_space(source, position + 1))
        start = _skip_space(source, _skip_space(source, end) + 1)
        _, end = _JSON.raw_decode(source, start)
        if key == wanted:  # no break: json uses the last of repeated keys
            value = source[start:end]
        position = _skip_space(source, end)
    return value


def _skip_space(text: str, position: int) -> int:
    return len(text) - len(text[position:].lstrip())


def _tag_begun(text: str) -> int:
    """How many characters at the end of `text` could be the beginning of an opening tag."""
    return next((n for n in range(len(_OPEN) - 1, 0, -1) if text.endswith(_OPEN[:n])), 0)

"""The parts of which tool calls are made: how each is read from a response that is still growing.

A part is a generator. It yields while the text that has arrived does not decide, returns the position after it, and
raises NotACall as soon as the text cannot be a call. Once the text is final, it never yields.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]

#: The longest name of a function, key of an argument or header of a message.
MAX_NAME = 256
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s<>\[\]{}()\"'`|]*")
#: Outside of strings: what begins a string, brackets, and what JSON does not have.
_OUTSIDE_JSON = re.compile(r'["{}\[\]]|[^\s\w.,:+\-]')
_INSIDE_JSON = re.compile(r'\\.|"|[\x00-\x1f]', re.DOTALL)
#: The ids that some models give their calls.
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")
#: What may stand between two calls that fill an answer.
_SEPARATOR_OR_END = re.compile(r"\s*(?:[;\n]\s*|\Z)")


class NotACall(Exception):
    """The text is not a tool call."""


@dataclass(slots=True)
class GrowingText:
    """A response's text, as far as it has arrived."""

    text: str = ""
    final: bool = False
    """Whether the response has ended."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as the model wrote it. `arguments` is a JSON object."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(slots=True)
class BlockDraft:
    """What has been read of a block."""

    schemas: Mapping[str, Any]
    """The parameters of the offered functions, by name."""
    name: str = ""
    id: str | None = None
    calls: list[WrittenCall] = field(default_factory=list)


Part = Callable[[GrowingText, int, BlockDraft], Reading[int]]


def after_space(source: GrowingText, at: int) -> Reading[int]:
    """The position after whitespace."""
    while True:
        end = _SPACE.match(source.text, at).end()  # type: ignore[union-attr]
        if end < len(source.text) or source.final:
            return end
        yield


def after_literal(source: GrowingText, at: int, literals: Sequence[str]) -> Reading[int | None]:
    """The position after the literal that stands here; None if none does."""
    longest = max(map(len, literals))
    while True:
        rest = source.text[at : at + longest]
        found = next((each for each in literals if rest.startswith(each)), None)
        if found is not None:
            return at + len(found)
        if source.final or not any(each.startswith(rest) for each in literals):
            return None
        yield


def find(source: GrowingText, at: int, mark: str) -> Reading[int]:
    """Where a mark stands next. Raises NotACall if there is none."""
    start = at
    while True:
        found = source.text.find(mark, start)
        if found >= 0:
            return found
        if source.final:
            raise NotACall
        start = max(at, len(source.text) - len(mark) + 1)
        yield


def ends_here(source: GrowingText, at: int, literals: Sequence[str]) -> Reading[int | None]:
    """The position after the literal that stands here, of which the end of the response may have cut off a part."""
    end = yield from after_literal(source, at, literals)
    rest = source.text[at:]
    if end is None and source.final and any(each.startswith(rest) for each in literals):
        return len(source.text)
    return end


def literal(*literals: str) -> Part:
    """One of these texts."""

    def read(source: GrowingText, at: int, _draft: BlockDraft) -> Reading[int]:
        end = yield from after_literal(source, at, literals)
        if end is None:
            raise NotACall
        return end

    return read


def maybe(*literals: str) -> Part:
    """One of these texts or nothing."""

    def read(source: GrowingText, at: int, _draft: BlockDraft) -> Reading[int]:
        end = yield from after_literal(source, at, literals)
        return at if end is None else end

    return read


def up_to(mark: str) -> Part:
    """Anything on one line, and the mark after it."""

    def read(source: GrowingText, at: int, _draft: BlockDraft) -> Reading[int]:
        while (found := source.text.find(mark, at)) < 0:
            if source.final or "\n" in source.text[at:] or len(source.text) - at > MAX_NAME:
                raise NotACall
            yield
        if "\n" in source.text[at:found] or found - at > MAX_NAME:
            raise NotACall
        return found + len(mark)

    return read


def read_name(source: GrowingText, at: int) -> Reading[str]:
    while True:
        end = _NAME.match(source.text, at).end()  # type: ignore[union-attr]
        if end - at > MAX_NAME:
            raise NotACall
        if end < len(source.text) or source.final:
            break
        yield
    if end == at:
        raise NotACall
    return source.text[at:end]


def name(source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
    """The function's name."""
    draft.name = yield from read_name(source, at)
    return at + len(draft.name)


def maybe_id(mark: str) -> Part:
    """The call's id after a mark, or nothing."""

    def read(source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
        end = yield from after_literal(source, at, (mark,))
        if end is None:
            return at
        given = yield from read_name(source, end)
        draft.id = given if _CALL_ID.fullmatch(given) else None
        return end + len(given)

    return read


def json_arguments(source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
    """The arguments as a JSON object."""
    end = yield from json_end(source, at)
    arguments = source.text[at:end]
    draft.calls.append(WrittenCall(draft.name, checked_object(arguments), draft.id))
    return end


def json_calls(source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
    """One call as a JSON object with its name, or a list of these."""
    end = yield from json_end(source, at)
    written = source.text[at:end]
    elements = list_elements(written) if written.startswith("[") else [written]
    draft.calls += [json_call(element, default="{}") for element in elements]
    if not draft.calls:
        raise NotACall
    return end


def json_calls_to_the_end(source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
    """Calls as JSON objects, split by `;` or line breaks, up to the end of the response."""
    while True:
        end = yield from json_end(source, at)
        draft.calls.append(json_call(source.text[at:end], default=None))
        following = yield from after_space(source, end)
        if source.text.startswith(";", following):
            following = yield from after_space(source, following + 1)
        gap = _SEPARATOR_OR_END.match(source.text, end)
        if gap is None or gap.end() != following:
            raise NotACall
        if following == len(source.text):
            return following
        at = following


def json_end(source: GrowingText, at: int) -> Reading[int]:
    """The position after a JSON object or list, in one pass over a text that grows."""
    while at == len(source.text) and not source.final:
        yield
    if not source.text.startswith(("{", "["), at):
        raise NotACall
    end = yield from balanced_end(source, at, '"', _OUTSIDE_JSON, _INSIDE_JSON)
    return end


def balanced_end(
    source: GrowingText, at: int, quote: str, outside: re.Pattern[str], inside: re.Pattern[str]
) -> Reading[int]:
    """The position after the bracket that closes the one here.

    Outside of strings, `outside` finds quotes, brackets and what is not allowed; inside of them, `inside` finds the
    quote that ends the string, pairs of characters that are skipped, and what is not allowed.
    """
    depth = 0
    in_string = False
    while True:
        for_more = len(source.text) if source.final else len(source.text) - len(quote) + 1
        while mark := (inside if in_string else outside).search(source.text, at):
            sign = mark[0]
            if sign == quote:
                in_string = not in_string
            elif not in_string and sign in "{[":
                depth += 1
            elif not in_string and sign in "}]":
                depth -= 1
                if depth == 0:
                    return mark.end()
            elif not (in_string and sign[0] == "\\" and len(sign) == 2):
                if mark.start() >= for_more:
                    break
                raise NotACall
            at = mark.end()
        if source.final:
            raise NotACall
        # The last characters may be the beginning of a quote, or a backslash.
        at = max(at, len(source.text) - max(len(quote) - 1, 1))
        yield


@dataclass(frozen=True)
class Notation:
    """Arguments as Gemma writes them: JSON with bare keys, and strings between marks of their own."""

    quote: str

    def __call__(self, source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
        while at == len(source.text) and not source.final:
            yield
        if not source.text.startswith("{", at):
            raise NotACall
        quote = re.escape(self.quote)
        outside = re.compile(rf"{quote}|[{{}}\[\]]|<")
        end = yield from balanced_end(source, at, self.quote, outside, re.compile(quote))
        written = source.text[at:end]
        pattern = re.compile(
            rf"{quote}(?P<text>.*?){quote}|(?P<key>(?<=[{{,])[^{{}}\[\],:<]+(?=:))|\bNone\b", re.DOTALL
        )
        arguments = checked_object(pattern.sub(self._as_json, written))
        draft.calls.append(WrittenCall(draft.name, json.dumps(json.loads(arguments), ensure_ascii=False)))
        return end

    @staticmethod
    def _as_json(found: re.Match[str]) -> str:
        if found["text"] is not None:
            return json.dumps(found["text"], ensure_ascii=False)
        return json.dumps(found["key"].strip(), ensure_ascii=False) if found["key"] is not None else "null"


@dataclass(frozen=True)
class Tagged:
    """Arguments as tags around keys and values. Strings stand as they are, other values as JSON.

    Which of them a value is follows from the function's schema. Without one, whatever is JSON counts as JSON.
    """

    key: str
    """What stands before a key."""
    after_key: str
    before_value: str
    after_value: str
    end: str
    """What follows the last argument."""
    on_lines: bool = False
    """Whether a value stands on lines of its own."""

    def __call__(self, source: GrowingText, at: int, draft: BlockDraft) -> Reading[int]:
        schema = draft.schemas.get(draft.name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        arguments: dict[str, Any] = {}
        while (begin := (yield from after_literal(source, at, (self.key,)))) is not None:
            value_at = yield from up_to(self.after_key)(source, begin, draft)
            key = source.text[begin : value_at - len(self.after_key)]
            if self.before_value:
                value_at = yield from after_space(source, value_at)
                value_at = yield from literal(self.before_value)(source, value_at, draft)
            value, at = yield from self._value(source, value_at)
            kind = properties.get(key) if isinstance(properties, dict) else None
            arguments[key] = typed(value, kinds_of(kind))
        written = json.dumps(arguments, ensure_ascii=False)
        draft.calls.append(WrittenCall(draft.name, checked_object(written)))
        return at

    def _value(self, source: GrowingText, at: int) -> Reading[tuple[str, int]]:
        """A value and where the next tag stands. A value may contain the tag that ends it, if no other tag follows."""
        end = at
        while True:
            end = yield from find(source, end, self.after_value)
            following = yield from after_space(source, end + len(self.after_value))
            if (yield from ends_here(source, following, (self.key, self.end))) is not None:
                break
            end += len(self.after_value)
        value = source.text[at:end]
        return (value.removeprefix("\n").removesuffix("\n") if self.on_lines else value), following


#: JSON's name of a type for each of Python's.
KINDS = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
#: How some templates write values that are not JSON.
PYTHON_WORDS = {"True": True, "False": False, "None": None}


def kinds_of(schema: Any, depth: int = 2) -> set[str]:
    """The types that a schema allows; empty if it does not say, or not within so many levels."""
    if not isinstance(schema, dict) or not depth:
        return set()
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {kind for kind in types if isinstance(kind, str)}
    if isinstance(schema.get("enum"), list):
        return {KINDS.get(type(value), "string") for value in schema["enum"]}
    choices = schema.get("anyOf") or schema.get("oneOf")
    parts = choices if isinstance(choices, list) else []
    return {kind for part in parts for kind in kinds_of(part, depth - 1)}


def typed(written: str, kinds: set[str]) -> Any:
    """The value of an argument that is written without a sign of its type."""
    if kinds == {"string"}:
        return written
    try:
        value = PYTHON_WORDS[written] if written in PYTHON_WORDS else JSON.decode(written)
    except (ValueError, RecursionError):
        return written
    if isinstance(value, str):
        return written
    kind = KINDS[type(value)]
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return value if fits or "string" not in kinds else written


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def checked_object(arguments: str) -> str:
    """The text of a JSON object. Raises NotACall if it is none, or cannot be sent."""
    try:
        if not isinstance(JSON.decode(arguments), dict):
            raise NotACall
        arguments.encode()  # half of a surrogate pair is valid JSON, but cannot be sent
    except (ValueError, RecursionError):  # the latter for deeply nested brackets
        raise NotACall from None
    return arguments


def json_call(written: str, default: str | None) -> WrittenCall:
    """The call in a JSON object. Its arguments are kept as they are written. Raises NotACall.

    `default` replaces missing arguments; if it is None, a call without arguments is not a call.
    """
    try:
        call = JSON.decode(written)
        if not isinstance(call, dict) or not isinstance(function := call.get("name"), str) or not function:
            raise NotACall
        function.encode()
        key = "arguments" if "arguments" in call else "parameters"
        arguments = _member_source(written, key) if key in call else default
    except (ValueError, RecursionError):
        raise NotACall from None
    if isinstance(encoded_twice := call.get(key), str):
        arguments = encoded_twice
    if arguments is None:
        raise NotACall
    given = call.get("id")
    id = given if isinstance(given, str) and _CALL_ID.fullmatch(given) else None
    return WrittenCall(function, checked_object(arguments), id)


def list_elements(written: str) -> list[str]:
    """The texts of a JSON list's elements. Raises NotACall."""
    elements = []
    try:
        JSON.decode(written)
        position = _skip_space(written, 1)
        while written[position] != "]":
            _, end = JSON.raw_decode(written, position)
            elements.append(written[position:end])
            position = _skip_space(written, end)
            if written[position] == ",":
                position = _skip_space(written, position + 1)
    except (ValueError, RecursionError):
        raise NotACall from None
    return elements


def _member_source(source: str, wanted: str) -> str:
    """The text of a member's value in the text of a JSON object that has this member."""
    value = ""
    position = 0
    while source[position] != "}":
        key, end = JSON.raw_decode(source, _skip_space(source, position + 1))
        start = _skip_space(source, _skip_space(source, end) + 1)
        _, end = JSON.raw_decode(source, start)
        if key == wanted:  # no break: json uses the last of repeated keys
            value = source[start:end]
        position = _skip_space(source, end)
    return value


def _skip_space(text: str, position: int) -> int:
    return _SPACE.match(text, position).end()  # type: ignore[union-attr]

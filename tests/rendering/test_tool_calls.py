"""Calls come out whole, everything else byte for byte, however the response was cut."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser, new_call_id
from openclaw_rl.rendering.tool_formats import FORMATS, WRITTEN, choose_format
from support.properties import examples

OPEN, CLOSE, TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"

Parsed = list[str | tuple[str, str]]


def parse(format: str, pieces: Sequence[str], tools: Sequence[dict[str, Any]] = ()) -> Parsed:
    """What a parser makes of a response in these pieces: text, adjacent joined, and (name, arguments)."""
    numbers = itertools.count()
    parser = ToolParser(FORMATS[format], tools, lambda: f"call{next(numbers)}")
    out = [item for piece in pieces for item in parser.push(piece)] + parser.flush()
    calls = [item for item in out if isinstance(item, ParsedToolCall)]
    assert [call.id for call in calls] == [f"call{n}" for n in range(len(calls))]
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    parsed: Parsed = []
    for item in out:
        if isinstance(item, ParsedToolCall):
            parsed.append((item.name, item.arguments))
        elif parsed and isinstance(parsed[-1], str):
            parsed[-1] += item
        else:
            parsed.append(item)
    return parsed


def hermes(response: str) -> Parsed:
    return parse("hermes", [response])


def llama(response: str) -> Parsed:
    return parse("llama3", [response])


def cut(text: str, at: set[int]) -> list[str]:
    edges = [0, *sorted(position for position in at if position < len(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([OPEN, CLOSE, '"', "\\", "{}", "\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
argument_texts = st.builds(
    json.dumps,
    st.dictionaries(st.text(max_size=5), values, max_size=3),
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)
names = st.text(min_size=1, max_size=10)
calls = st.tuples(names, argument_texts)
cuts = st.sets(st.integers(0, 400), max_size=40)


def write(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def block(name: str, arguments: str) -> str:
    return f"{OPEN}\n{write(name, arguments)}\n{CLOSE}"


#: A call of each format whose template writes no JSON.
OTHER_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
    "gemma4": '<|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|>',
    "functiongemma": "<start_function_call>call:f{a:<escape>b<escape>}<end_function_call>",
}


def samples(format: str) -> list[str]:
    """A call in each of the ways to write it."""
    ways = [way.write("f", {"a": "b"}) for way in WRITTEN.get(format, ())]
    return ways or [OTHER_CALLS[format]]


# Fragments that meet in every order: most of what they make is malformed in some way.
SIGNS = [" ", "\n", ";", "{", "}", '"', "\\", ":", ",", "text", '"a"', "<", "f", "[", "]", ">"]
CALLS = ['{"name": "f"', '"arguments": {}', '{"name": "f", "parameters": {}}', '{"a": 1}', block("g", '{"a": 1}')]


def fragments(format: str) -> st.SearchStrategy[str]:
    markers = sorted(FORMATS[format].all_markers)
    whole = samples(format)
    cut_off = [text[:place] for text in whole for place in (len(text) // 3, len(text) // 2, len(text) - 2)]
    pieces = [*markers, *(marker[:-2] for marker in markers), *whole, *cut_off, *SIGNS, *CALLS]
    return st.lists(st.sampled_from(pieces), max_size=12).map("".join)


every_format = pytest.mark.parametrize("format", FORMATS)


@every_format
@given(data=st.data(), at=cuts)
@examples(100)
def test_cutting_makes_no_difference(format: str, data: st.DataObject, at: set[int]) -> None:
    response = data.draw(fragments(format))
    whole = parse(format, [response])
    assert parse(format, cut(response, at)) == whole
    assert parse(format, response) == whole


@every_format
@given(data=st.data())
@examples(60)
def test_text_is_conserved(format: str, data: st.DataObject) -> None:
    response = data.draw(fragments(format))
    parsed = parse(format, [response])
    texts = [item for item in parsed if isinstance(item, str)]
    if len(texts) == len(parsed):
        assert "".join(texts) == response
    position = 0
    for text in texts:
        position = response.index(text, position) + len(text)


@every_format
def test_a_broken_call_is_text_and_does_not_cost_the_next(format: str) -> None:
    begun = f"{FORMATS[format].openings[0]}f words "
    assert parse(format, begun) == [begun]
    for written in samples(format):
        assert parse(format, written) == [("f", '{"a": "b"}')]
        assert parse(format, written[: len(written) // 2]) == [written[: len(written) // 2]]
        if not FORMATS[format].fills_answer:
            assert parse(format, begun + written) == [begun, ("f", '{"a": "b"}')]


@every_format
@examples(20)
@given(text=st.text(alphabet='ab \n{"', max_size=60))
def test_text_is_not_held_back(format: str, text: str) -> None:
    parser = ToolParser(FORMATS[format])
    out = "".join(item for char in f"x{text}" for item in parser.push(char) if isinstance(item, str))
    held = f"x{text}".removeprefix(out)
    assert any(opening.startswith(held) for opening in FORMATS[format].openings)


def test_values_without_types_follow_the_schema() -> None:
    properties = {"text": {"type": "string"}, "number": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    pairs = {"text": "12", "number": "12", "other": "[1]", "plain": "a b", "none": "None"}
    body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in pairs.items())
    for tools, text in (([{"type": "function", "function": function}], "12"), ([], 12)):
        ((_, arguments),) = parse("glm", f"<tool_call>f{body}</tool_call>", tools)
        assert json.loads(arguments) == {"text": text, "number": 12, "other": [1], "plain": "a b", "none": None}


between = st.sampled_from(["", "\n", "so:\n", " and <b>\n ", "\n{}"])


@given(st.lists(st.tuples(between, calls), max_size=3), cuts)
def test_hermes_calls_with_text_between(parts: list[tuple[str, tuple[str, str]]], at: set[int]) -> None:
    response = "".join(text + block(*call) for text, call in parts)
    expected = [item for text, call in parts for item in (text, call) if item == call or text.strip()]
    assert parse("hermes", cut(response, at)) == expected
    assert parse("hermes", response) == expected


@given(calls, cuts)
def test_hermes_call_cut_off_at_its_end(call: tuple[str, str], at: set[int]) -> None:
    """Whole JSON is a call with as little of the end tag as there is; less than whole JSON is text."""
    response = block(*call)
    for end in range(len(response) - len(CLOSE), len(response)):
        assert parse("hermes", cut(response[:end], at)) == [call]
    unfinished = response[: response.rindex("}")]
    assert parse("hermes", cut(unfinished, at)) == [unfinished]


@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from([";", "\n", " ; ", ";\n", "\n\n"]), cuts)
def test_llama_calls(parts: list[tuple[str, str]], separator: str, at: set[int]) -> None:
    body = separator.join(write(*part, key="parameters") for part in parts)
    for response in (body, f" \n{TAG}{body}\n", f"{TAG} {body};"):
        assert parse("llama3", cut(response, at)) == parts


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "{}",
        "[]",
        '{"name": "f", "arguments": {}',
        '{"name": "f", "arguments": {}}}',
        '{"name": "f", "arguments": {}} and more',
        '{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "none"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\n"}}',
        '{"name": "f, "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "}}",
    ],
    ids=lambda body: body[:40],
)
def test_what_is_not_a_call_stays_text(body: str) -> None:
    assert hermes(f" {OPEN}{body}{CLOSE}\n") == [f" {OPEN}{body}{CLOSE}\n"]
    assert llama(f" {body}\n") == [f" {body}\n"]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        (
            '{"arguments": { "b" :1.50, "a":"\\u00e9" } , "name": "f", "id": 7}',
            '{ "b" :1.50, "a":"\\u00e9" }',
        ),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ('{"name": "f", "parameters": {"a": {"arguments": {}}}}', '{"a": {"arguments": {}}}'),
        ('{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}', '{"a": 2}'),
        (
            f'{{"name": "f", "arguments": {{"a": "\\"{CLOSE}{OPEN}{{\\\\"}}}}',
            f'{{"a": "\\"{CLOSE}{OPEN}{{\\\\"}}',
        ),
    ],
)
def test_arguments_keep_the_models_spelling(body: str, arguments: str) -> None:
    assert hermes(f"{OPEN}{body}{CLOSE}") == [("f", arguments)]


def test_llama_wants_arguments() -> None:
    assert llama('{"name": "Ada"}') == ['{"name": "Ada"}']


def test_a_malformed_block_does_not_cost_the_next_call() -> None:
    good = block("f", "{}")
    for bad in (
        f"{OPEN}nothing{CLOSE}",
        f'{OPEN}{{"name": "f}}{CLOSE}',
        f'{OPEN}{{"name": "f"',
        OPEN,
        OPEN + "{",
    ):
        assert hermes(f"{bad}\n{good}") == [f"{bad}\n", ("f", "{}")]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (" \n", [" \n"]),
        (f"\n{block('f', '{}')}\n\n{block('g', '{}')} \n", [("f", "{}"), ("g", "{}")]),
        (f"a \n{block('f', '{}')}\n b ", ["a \n", ("f", "{}"), "\n b "]),
    ],
)
def test_only_mere_whitespace_next_to_a_call_is_dropped(response: str, expected: Parsed) -> None:
    assert hermes(response) == expected


@given(st.text(alphabet="ab \n<tool_call", max_size=100).filter(lambda text: OPEN not in text))
def test_hermes_holds_back_no_text_but_a_tag_under_way(text: str) -> None:
    parser = ToolParser(FORMATS["hermes"])
    out = "".join(item for char in text for item in parser.push(char) if isinstance(item, str))
    held = text.removeprefix(out)
    assert OPEN.startswith(held) or not text.strip() or (not out and OPEN.startswith(held.lstrip()))


@pytest.mark.parametrize("prose", [f"the {OPEN} tag ", f'{OPEN}{{"a": "b\n'])
def test_hermes_streams_on_once_a_block_cannot_be_a_call(prose: str) -> None:
    parser = ToolParser(FORMATS["hermes"])
    assert "".join(map(str, parser.push(prose))) == prose
    assert parser.push("more") == ["more"]


def test_llama_streams_text_at_once() -> None:
    parser = ToolParser(FORMATS["llama3"])
    assert parser.push(" <|py") == []
    assert parser.push("x") == [" <|pyx"]
    assert parser.push('{"name') == ['{"name']


def test_a_long_call_in_small_pieces() -> None:
    arguments = json.dumps({"text": 'a\n"b"\n' * 20_000})
    response = block("f", arguments)
    assert parse("hermes", [response[n : n + 10] for n in range(0, len(response), 10)]) == [("f", arguments)]


def test_ids_are_alphanumeric_and_distinct() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(made.startswith("call") and len(made) == 28 and made.isascii() and made.isalnum() for made in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        (f"return {OPEN}", "hermes"),
        (f"{TAG} or {OPEN}", "hermes"),
        (TAG, "llama3"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3"),
        ('{"name": "f", "description": "d", "parameters": {}}', "hermes"),
    ],
)
def test_choose_format(template: str | None, name: str) -> None:
    assert choose_format(template or "") == name
    assert name in FORMATS

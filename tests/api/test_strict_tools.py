"""Tools with `strict` under `tool_choice: auto`: which answers are restricted, and how."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.types import Constraint
from support.harness import Bench, running

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Iterator[Bench]:
    """A server whose engine says that it can restrict answers; its script need not fit."""
    with running(Bench(tiny_model)) as bench:
        bench.service.reader.rules.constrains = True
        yield bench


def test_an_engine_that_cannot_restrict_answers_freely(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as free:
        assert constraint(free, tools=[tool("look", strict=True)]) is None


def tool(name: str, **fields: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def constraint(bench: Bench, **fields: Any) -> Constraint | None:
    response = bench.post({"messages": HELLO, **fields})
    assert response.status_code == 200, response.text
    return bench.sampler.requests[-1].constraint


def test_calls_of_strict_tools_must_fit_and_text_is_free(bench: Bench) -> None:
    for choice in ({}, {"tool_choice": "auto"}):
        given = constraint(bench, tools=[tool("look", strict=True), tool("go")], **choice)
        assert given is not None
        assert (given.content, given.trigger) == (None, "<tool_call>")
        assert given.separator is not None
        strict, free = given.calls
        assert ("integer" in strict.schema, strict.strict) == (True, True)
        assert ("integer" in free.schema, free.strict) == (False, False)
        assert all(form.before.startswith(given.trigger) for form in given.calls)


def test_one_call_at_most_with_auto(bench: Bench) -> None:
    given = constraint(bench, tools=[tool("look", strict=True)], parallel_tool_calls=False)
    assert given is not None
    assert given.separator is None


@pytest.mark.parametrize(
    "fields", [{"tools": [tool("look")]}, {"tools": [tool("look", strict=True)], "tool_choice": "none"}, {}]
)
def test_without_strict_tools_answers_are_free(bench: Bench, fields: dict[str, Any]) -> None:
    assert constraint(bench, **fields) is None


def test_required_calls_have_no_free_text(bench: Bench) -> None:
    given = constraint(bench, tools=[tool("look", strict=True)], tool_choice="required")
    assert given is not None
    assert given.trigger == ""


def test_the_other_wires_have_strict_tools_too(bench: Bench) -> None:
    schema = tool("look")["function"]["parameters"]
    look = {"name": "look", "input_schema": schema, "strict": True}
    assert bench.send("messages", {"messages": HELLO, "max_tokens": 9, "tools": [look]}).status_code == 200
    assert bench.sampler.requests[-1].constraint.trigger == "<tool_call>"
    function = {"type": "function", "name": "look", "parameters": schema, "strict": True}
    assert bench.send("responses", {"input": "hello", "tools": [function]}).status_code == 200
    assert bench.sampler.requests[-1].constraint.trigger == "<tool_call>"

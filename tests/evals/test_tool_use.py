"""Function calling: the cases are sound, and grading tells right from wrong, part by part."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.client import TOO_LONG, ServerError
from openclaw_rl.errors import UserError
from openclaw_rl.evals import tool_use
from openclaw_rl.evals.chat import Message, Reply, ToolCall
from openclaw_rl.evals.scores import CaseScore, TaskScores, ask_all
from openclaw_rl.evals.tool_use import Expected, ToolCase, bfcl_cases, cases, grade, normalised
from openclaw_rl.lab.schema import mismatch

CASES = {case.name: case for case in cases()}


def right_reply(case: ToolCase, optional: bool = False, choice: int = 0) -> Reply:
    """A reply that the case should accept: with every optional argument or none, with the first or the last value."""
    calls = []
    for call in case.calls:
        values = {**call.arguments, **(call.optional if optional else {})}
        arguments = {name: accepted[choice] for name, accepted in values.items()}
        calls.append(ToolCall(call.name, json.dumps(arguments, ensure_ascii=False)))
    return Reply("" if calls else "Gladly.", tuple(calls))


def called(name: str, **arguments: Any) -> Reply:
    return Reply("", (ToolCall(name, json.dumps(arguments)),))


class Scripted:
    """A model that knows the right calls; what it is asked is kept."""

    def __init__(self, replies: dict[str, Reply | Exception]) -> None:
        self.replies = replies
        self.asked: list[dict[str, Any]] = []

    async def ask(self, messages: Sequence[Message], **how: Any) -> Reply:
        self.asked.append(how)
        reply = self.replies[messages[-1]["content"]]
        if isinstance(reply, Exception):
            raise reply
        return reply


def test_there_are_enough_cases_of_every_kind():
    kinds = Counter(name.split("/")[0] for name in CASES)
    wanted = {"single", "several", "choose", "none", "enum", "nested", "types", "optional", "two", "language"}
    assert len(CASES) == len(cases()) >= 110
    assert kinds.keys() == wanted
    assert min(kinds.values()) >= 10
    assert len({case.prompt for case in cases()}) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_every_case_accepts_what_it_asks_for(name: str):
    case = CASES[name]
    for optional in (False, True):
        for choice in (0, -1):
            seen = grade(case, right_reply(case, optional, choice))
            assert seen.passed, seen.detail
            assert seen.parts == {"format": 1.0, "name": 1.0, "arguments": 1.0}


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_sound(name: str):
    """Its tools are OpenAI's, the right one is among them, and every accepted value fits the schema."""
    case = CASES[name]
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.tools}
    assert len(functions) == len(case.tools) >= 1
    for call in case.calls:
        parameters = functions[call.name]
        assert set(parameters["required"]) <= call.arguments.keys()
        assert not call.arguments.keys() & call.optional.keys()
        for argument, accepted in {**call.arguments, **call.optional}.items():
            assert accepted
            for value in accepted:
                assert mismatch(value, parameters["properties"][argument]) == ""


@pytest.mark.parametrize("name", CASES)
def test_every_case_refuses_what_is_wrong(name: str):
    case, right = CASES[name], right_reply(CASES[name])
    assert not grade(case, Reply("")).passed
    assert not grade(case, called("no_such_tool")).passed
    twice = Reply("", (*right.tool_calls, *right.tool_calls, ToolCall("no_such_tool", "{}")))
    assert not grade(case, twice).passed
    if case.calls:
        assert not grade(case, Reply("I would call a tool.")).passed
        arguments = json.loads(right.tool_calls[0].arguments)
        for argument in arguments:
            changed = {**arguments, argument: "something else entirely"}
            rest = right.tool_calls[1:]
            seen = grade(case, Reply("", (ToolCall(case.calls[0].name, json.dumps(changed)), *rest)))
            assert not seen.parts["arguments"]
            assert seen.parts["name"] == 1.0


WEATHER = CASES["single/weather-oslo"]


def parts(case: ToolCase, reply: Reply) -> tuple[float, ...]:
    seen = grade(case, reply)
    assert seen.passed == all(seen.parts.values())
    assert bool(seen.detail) != seen.passed
    return tuple(seen.parts[part] for part in ("format", "name", "arguments"))


@pytest.mark.parametrize(
    ("reply", "graded"),
    [
        (called("get_weather", city=" oslo "), (1, 1, 1)),
        (called("get_weather", city="OSLO", unit="celsius"), (1, 1, 1)),
        (called("get_weather", city="Oslo", unit="fahrenheit"), (1, 1, 0)),
        (called("get_weather", city="Oslo", unit="kelvin"), (0, 1, 0)),
        (called("get_weather", city="Bergen"), (1, 1, 0)),
        (called("get_weather", city=7), (0, 1, 0)),
        (called("get_weather"), (0, 1, 0)),
        (called("get_weather", city="Oslo", country="Norway"), (1, 1, 0)),
        (called("weather", city="Oslo"), (1, 0, 0)),
        (Reply("", (ToolCall("get_weather", "{'city': 'Oslo'}"),)), (0, 1, 0)),
        (Reply("", (ToolCall("get_weather", '["Oslo"]'),)), (0, 1, 0)),
        (Reply("", (ToolCall("get_weather", "[" * 10**5),)), (0, 1, 0)),
        (Reply("", (ToolCall("get_weather", '{"city": ' + "[" * 900 + "]" * 900 + "}"),)), (0, 1, 0)),
        (Reply('<tool_call>{"name": "get_weather"'), (0, 0, 0)),
        (Reply("It is cold there."), (0, 0, 0)),
        (Reply("Let me see.", called("get_weather", city="Oslo").tool_calls), (1, 1, 1)),
    ],
)
def test_parts_are_graded_one_by_one(reply: Reply, graded: tuple[float, ...]):
    assert parts(WEATHER, reply) == graded


@pytest.mark.parametrize(
    ("reply", "graded"),
    [
        (Reply("I am well."), (1, 1, 1)),
        (Reply(" \n"), (0, 0, 0)),
        (called("get_weather", city="Oslo"), (1, 0, 0)),
        (Reply('<tool_call>{"name": "get_weather", "arg'), (0, 1, 1)),
    ],
)
def test_no_call_is_right_where_none_fits(reply: Reply, graded: tuple[float, ...]):
    assert parts(CASES["none/hello"], reply) == graded


def test_numbers_are_no_texts():
    order, timer, door = CASES["single/order-status"], CASES["types/number-word"], CASES["enum/door"]
    assert parts(order, called("get_order_status", order_id=88213)) == (0, 1, 0)
    assert parts(timer, called("set_timer", minutes="20")) == (0, 1, 0)
    assert parts(timer, called("set_timer", minutes=20.0)) == (1, 1, 1)
    assert parts(door, called("lock_door", door="garage", locked=1)) == (0, 1, 0)


def test_calls_may_come_in_any_order_but_each_once():
    case = CASES["two/weather"]
    rome, athens = right_reply(case).tool_calls
    assert parts(case, Reply("", (athens, rome))) == (1, 1, 1)
    assert parts(case, Reply("", (rome, rome))) == (1, 1, 0)
    assert parts(case, Reply("", (rome,))) == (1, 0, 0)
    assert parts(case, Reply("", (rome, athens, athens))) == (1, 0, 0)


def test_a_call_that_fits_two_expectations_is_matched_with_the_right_one():
    either, one = Expected("set_volume", {"level": [1, 2]}), Expected("set_volume", {"level": [1]})
    case = ToolCase("x", "x", CASES["single/volume"].tools, (either, one))
    calls = [ToolCall("set_volume", json.dumps({"level": level})) for level in (1, 2)]
    assert grade(case, Reply("", tuple(calls))).passed
    assert grade(case, Reply("", tuple(calls[::-1]))).passed


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(list(CASES.values())), st.text(max_size=20), json_values)
def test_grading_survives_anything(case: ToolCase, name: str, value: Any):
    calls = [ToolCall(name, json.dumps(value))]
    calls += [ToolCall(call.name, json.dumps(dict.fromkeys(call.arguments, value))) for call in case.calls]
    seen = grade(case, Reply("", tuple(calls)))
    assert not seen.passed
    assert seen.parts.keys() == {"format", "name", "arguments"}


@given(st.text(max_size=20), st.text(st.characters(max_codepoint=127)))
def test_case_and_space_do_not_matter(text: str, ascii_text: str):
    assert normalised(f"  {text} ") == normalised(text)
    assert normalised(" ".join(ascii_text.swapcase())) == normalised(ascii_text)


@pytest.mark.parametrize(
    ("value", "given_schema", "fits"),
    [
        (3, {"type": "integer", "minimum": 3, "maximum": 3}, True),
        (2, {"type": "integer", "minimum": 3}, False),
        (4, {"type": "number", "maximum": 3}, False),
        (True, {"type": "integer"}, False),
        (2.5, {"type": "integer"}, False),
        (2, {"type": "number"}, True),
        (float("inf"), {"type": "integer"}, False),
        ("a", {"type": ["string", "number"]}, True),
        (None, {"type": ["string", "null"]}, True),
        (None, {"type": "string"}, False),
        ([1, "2"], {"type": "array", "items": {"type": "integer"}}, False),
        ([], {"type": "array", "minItems": 1}, False),
        ([1, 2], {"type": "array", "maxItems": 1}, False),
        ({"a": 1}, {"type": "object", "required": ["b"]}, False),
        ({"a": 1}, {"type": "object", "additionalProperties": False}, False),
        ({"a": 1}, {"type": "object"}, True),
        ({"a": {"b": "x"}}, {"properties": {"a": {"properties": {"b": {"enum": ["y"]}}}}}, False),
        ("anything", {}, True),
    ],
)
def test_values_are_held_to_their_schema(value: Any, given_schema: dict[str, Any], fits: bool):
    assert (not mismatch(value, given_schema)) is fits


async def run(
    chat: Any, some: Sequence[ToolCase], max_tokens: int = tool_use.MAX_TOKENS, **settings: Any
) -> TaskScores:
    async def score(case: ToolCase, reply: Reply) -> CaseScore:
        return grade(case, reply)

    return await ask_all(tool_use.TASK, chat, some, score, max_tokens=max_tokens, **settings)


async def test_a_run_asks_with_the_tools_and_keeps_out_of_the_record():
    some = cases()[:6]
    model, heard = Scripted({case.prompt: right_reply(case) for case in some}), []
    scores = await run(model, some, seed=3, max_tokens=99, on_case=heard.append)
    assert scores.pass_rate == 1.0
    assert [case.case for case in scores.cases] == [case.name for case in some]
    assert len(heard) == 6
    assert {(how["seed"], how["temperature"], how["keep"]) for how in model.asked} == {(3, 0.0, False)}
    assert {how["max_tokens"] for how in model.asked} == {99}
    assert sorted(how["tools"][0]["function"]["name"] for how in model.asked) == sorted(
        case.tools[0]["function"]["name"] for case in some
    )


async def test_all_cases_are_run():
    model = Scripted({case.prompt: right_reply(case) for case in cases()})
    assert (await run(model, cases())).pass_rate == 1.0
    assert len(model.asked) == len(CASES)
    assert (await run(model, [])).cases == ()


async def test_a_case_that_the_model_cannot_hold_fails_alone_and_a_refusal_ends_them_all():
    first, second = cases()[:2]
    too_long = ServerError("The context is too long.", status=400, code=TOO_LONG)
    model = Scripted(
        {
            first.prompt: too_long,
            second.prompt: right_reply(second),
        }
    )
    scores = await run(model, [first, second])
    assert [(case.passed, case.detail) for case in scores.cases] == [(False, "The context is too long."), (True, "")]
    model.replies[second.prompt] = ServerError("Nobody answers.")
    with pytest.raises(ServerError, match="Nobody answers"):
        await run(model, [first, second])


@pytest.fixture
def bfcl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package laid out like bfcl-eval, with two questions of our own. It cannot be imported, as without its needs."""
    data = tmp_path / "bfcl_eval" / "data"
    (data / "possible_answer").mkdir(parents=True)
    (tmp_path / "bfcl_eval" / "__init__.py").write_text("import something_that_is_not_installed")
    parameters = {
        "type": "dict",
        "properties": {
            "type": {"type": "string", "enum": ["oak", "elm"]},
            "height": {"type": "float"},
            "place": {"type": "dict", "properties": {"x": {"type": "any"}}},
            "spans": {"type": "tuple", "items": {"type": "integer"}},
        },
        "required": ["type"],
    }
    function = {"name": "garden.plant", "description": "Plant a tree.", "parameters": parameters}
    questions = [
        {"id": f"simple_python_{n}", "question": [[{"role": "user", "content": text}]], "function": [function]}
        for n, text in enumerate(("Plant an oak.", "Plant an elm, 2 m high, at x 5."))
    ]
    right = [
        {"type": ["oak"], "height": [1.5, ""]},
        {"type": ["elm"], "height": [2], "place": [{"x": [5, "five"], "y": ["", 0]}], "spans": [[1, 2]]},
    ]
    answers = [{"id": f"simple_python_{n}", "ground_truth": [{"garden.plant": one}]} for n, one in enumerate(right)]
    for path, lines in ((data, questions), (data / "possible_answer", answers[::-1])):
        (path / "BFCL_v4_simple_python.json").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_bfcl_is_read_where_it_is_installed(bfcl: Path):
    oak, elm = bfcl_cases()
    assert oak.name == "bfcl/simple_python_0"
    assert oak.prompt == "Plant an oak."
    assert grade(oak, called("garden_plant", type="oak")).passed
    assert grade(oak, called("garden_plant", type="Oak", height=1.5)).detail == (
        'garden_plant: \'type\' must be one of "oak", "elm", not "Oak".'
    )
    assert not grade(oak, called("garden_plant", type="oak", height=2)).passed
    assert grade(elm, called("garden_plant", type="elm", height=2, place={"x": "Five"}, spans=[1, 2])).passed
    assert grade(elm, called("garden_plant", type="elm", height=2, place={"x": 5, "y": 0}, spans=[1, 2])).passed
    assert not grade(elm, called("garden_plant", type="elm", height=2, place={"x": 6}, spans=[1, 2])).passed
    assert parts(elm, called("garden_plant", type="elm", height="2", place={"x": 5}, spans=[1, 2])) == (0, 1, 0)


def test_how_to_install_bfcl_is_said(bfcl: Path):
    for path in bfcl.rglob("*.json"):
        path.unlink()
    with pytest.raises(UserError, match="pip install --no-deps bfcl-eval"):
        bfcl_cases()

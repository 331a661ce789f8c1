"""Structured output and forced tool calls, with the official client and a real model behind it."""

import concurrent.futures
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field

from openclaw_rl.api.app import create_app
from openclaw_rl.api.completion import TokenSettings
from openclaw_rl.api.service import ChatService
from openclaw_rl.types import Thinking
from support.fakes import ScriptedSampler
from support.harness import DEFAULTS, MODEL, Bench, running
from support.local_bench import LocalBench, serving_local
from support.records import stored_turns
from support.tiny_models import save_tiny_model

HELLO: Any = [{"role": "user", "content": "hello"}]


class Verdict(BaseModel):
    good: bool
    colour: Literal["red", "green"]
    marks: list[Literal[1, 2]] = Field(max_length=3)


class Look(BaseModel):
    """Look at a thing."""

    at: Literal["fox", "dog"]
    twice: bool


class Jump(BaseModel):
    """Jump over a thing."""

    over: Literal["fox", "dog"]


TOOLS: Any = [openai.pydantic_function_tool(tool) for tool in (Look, Jump)]
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {"name": "v", "strict": True, "schema": to_strict_json_schema(Verdict)},
}
NAMED: Any = {"type": "function", "function": {"name": "Jump"}}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBench]:
    """A model with room for tools, whose template knows no reasoning."""
    model = save_tiny_model(tmp_path_factory.mktemp("model"), context=2048)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("<think>\n", ""))
    with serving_local(model, tmp_path_factory.mktemp("run")) as bench:
        yield bench


def ask(bench: LocalBench, **fields: Any) -> Any:
    return bench.client.chat.completions.create(model=MODEL, messages=HELLO, **{"max_tokens": 200, **fields})


def test_an_answer_is_parsed_into_the_model_that_the_client_gave(bench: LocalBench) -> None:
    for seed in range(5):
        parsed = bench.client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Verdict, seed=seed, max_tokens=200
        )
        assert isinstance(parsed.choices[0].message.parsed, Verdict)
        assert parsed.choices[0].finish_reason == "stop"


def test_a_streamed_answer_is_the_whole_one_in_pieces(bench: LocalBench) -> None:
    whole = ask(bench, response_format=SCHEMA, seed=3)
    with bench.client.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Verdict, seed=3, max_tokens=200
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content == final.choices[0].message.content


def test_json_object_is_any_object(bench: LocalBench) -> None:
    for seed in range(4):
        answer = ask(bench, response_format={"type": "json_object"}, seed=seed, temperature=0.3).choices[0]
        text = answer.message.content
        assert text.startswith("{")
        assert answer.finish_reason == "length" or isinstance(json.loads(text), dict)


def test_required_calls_are_one_or_several_of_the_tools(bench: LocalBench) -> None:
    counts = set()
    for given in ask(bench, tools=TOOLS, tool_choice="required", n=8, seed=1, max_tokens=300).choices:
        calls = given.message.tool_calls or []
        for call in calls:
            {"Look": Look, "Jump": Jump}[call.function.name].model_validate_json(call.function.arguments)
        if given.finish_reason == "tool_calls":
            assert not given.message.content
            counts.add(len(calls))
    assert counts - {0, 1}


def test_an_output_type_as_pydantic_ai_asks_for_it(bench: LocalBench) -> None:
    """Since 2.66, bounded fields are strict too, and the call that it refuses gets its errors as JSON."""
    fields = {"name": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    function = {"name": "final_result", "description": "The final response", "parameters": schema, "strict": True}
    asked = {"tools": [{"type": "function", "function": function}], "tool_choice": "required", "max_tokens": 300}
    question = {"role": "user", "content": "Which city?"}
    call = {"id": "c", "type": "function", "function": {"name": "final_result", "arguments": '{"people": -1}'}}
    refused = {"role": "tool", "tool_call_id": "c", "content": '{"error":[{"type":"missing","loc":["name"]}]}'}
    again = [question, {"role": "assistant", "content": None, "tool_calls": [call]}, refused]
    for messages in ([question], again):
        for choice in bench.client.chat.completions.create(
            model=MODEL, messages=messages, **asked, n=4, seed=1
        ).choices:
            given = json.loads(choice.message.tool_calls[0].function.arguments)
            assert set(given) == set(fields)
            assert len(given["name"]) <= 20
            assert 0 <= given["people"] <= 99


def test_the_client_parses_the_arguments_of_a_call(bench: LocalBench) -> None:
    parsed = bench.client.chat.completions.parse(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=NAMED, max_tokens=200
    )
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Jump)


@pytest.mark.parametrize(("choice", "names"), [("required", {"Look", "Jump"}), (NAMED, {"Jump"})])
def test_one_call_at_most(bench: LocalBench, choice: Any, names: set[str]) -> None:
    answer = ask(bench, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, n=4, seed=1)
    for given in answer.choices:
        (call,) = given.message.tool_calls
        assert given.finish_reason == "tool_calls"
        assert call.function.name in names
        {"Look": Look, "Jump": Jump}[call.function.name].model_validate_json(call.function.arguments)


def test_with_tools_and_a_schema_the_answer_is_either(bench: LocalBench) -> None:
    kinds = set()
    for given in ask(bench, tools=TOOLS, response_format=SCHEMA, parallel_tool_calls=False, n=8, seed=2).choices:
        if given.message.tool_calls:
            kinds.add("call")
        else:
            Verdict.model_validate_json(given.message.content)
            kinds.add("content")
    assert kinds == {"call", "content"}


class ConstrainingSampler(ScriptedSampler):
    """Says that it can constrain, and answers from its script."""

    capabilities = replace(ScriptedSampler.capabilities, constrains=True)


@pytest.mark.parametrize(
    ("options", "thinking"), [({}, Thinking.OPTIONAL), ({"enable_thinking": True}, Thinking.BEGUN)]
)
def test_reasoning_may_come_first_where_the_template_has_it(
    tiny_model: Path, options: dict[str, Any], thinking: Thinking
) -> None:
    scripted = Bench(tiny_model)
    sampler = ConstrainingSampler(scripted.script)
    scripted.app = create_app(ChatService(sampler, scripted.renderer, TokenSettings(DEFAULTS)), MODEL)
    with running(scripted):
        body = {"messages": HELLO, "response_format": SCHEMA, "chat_template_kwargs": options}
        assert scripted.post(body).status_code == 200
    (request,) = sampler.requests
    assert request.constraint is not None
    assert request.constraint.thinking is thinking


def test_an_answer_that_is_cut_off_says_so(bench: LocalBench) -> None:
    assert ask(bench, response_format=SCHEMA, max_tokens=3).choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        bench.client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Verdict, max_tokens=3)


def test_a_stop_string_ends_a_constrained_answer_too(bench: LocalBench) -> None:
    answer = ask(bench, response_format=SCHEMA, stop=['"colour"']).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content in ('{"good": true, ', '{"good": false, ')


def test_seeds_repeat_and_requests_beside_each_other_are_as_alone(bench: LocalBench) -> None:
    jobs: list[dict[str, Any]] = [
        {"response_format": SCHEMA, "seed": 1},
        {"seed": 2, "max_tokens": 40},
        {"tools": TOOLS, "tool_choice": NAMED, "seed": 3, "top_p": 0.9},
        {"seed": 4, "max_tokens": 40, "extra_body": {"top_k": 5}},
    ]

    def tell(job: dict[str, Any]) -> Any:
        message = ask(bench, **job).choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return message.content, calls

    alone = [tell(job) for job in jobs]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        together = list(threads.map(tell, jobs * 2))
    assert together == alone * 2


def test_what_was_forced_is_recorded_and_log_probs_are_raw(bench: LocalBench) -> None:
    free = ask(bench, seed=5, max_tokens=5, logprobs=True, top_logprobs=20)
    bound = ask(bench, seed=5, response_format=SCHEMA, logprobs=True, top_logprobs=20, extra_body={"top_k": 1})
    turns = {turn.completion: turn for turn in stored_turns(bench.run_dir)}
    turn = turns[bound.id]
    assert turns[free.id].forced == []
    assert len(turn.forced) == len(turn.response_ids)
    text = bench.renderer.tokenizer.backend
    assert text.decode([id for id, forced in zip(turn.response_ids, turn.forced, strict=True) if forced]).startswith(
        '{"good": '
    )
    assert any(turn.forced)
    assert not all(turn.forced)
    # The likeliest tokens at the first place are those of the free answer, and a brace is not the likeliest.
    first, free_first = bound.choices[0].logprobs.content[0], free.choices[0].logprobs.content[0]
    assert [entry.token for entry in first.top_logprobs] == [entry.token for entry in free_first.top_logprobs]
    assert first.logprob < 0
    assert turn.logprobs[0] == pytest.approx(first.logprob, abs=1e-5)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


def doubling(keyword: str) -> dict[str, Any]:
    """Each definition refers to the next one twice: 2³⁰ schemas if references are followed."""
    parts: dict[str, Any] = {
        f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]} for n in range(30)
    }
    return {"$defs": {**parts, "d30": {"type": "string", "maxLength": 5}}, "$ref": "#/$defs/d0"}


CROSSED = {
    "allOf": [
        {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {"type": "string"}}} for j in range(4)]}
        for i in range(10)
    ]
}
HOSTILE: dict[str, Any] = {
    "deep": nested(200),
    "large": {"enum": [f"value number {n}" for n in range(20_000)]},
    "crossed": CROSSED,
    "empty": {"enum": []},
    "endless": {"$ref": "#"},
    "self": {"allOf": [{"$ref": "#"}]},
    "unknown keyword": {"type": "object", "not": {"type": "string"}},
    "wrong pattern": {"type": "string", "pattern": "("},
    "outside": {"$ref": "https://example.com/schema.json"},
    "wide": {"type": "object", "properties": {f"k{n}": {"type": "string"} for n in range(2500)}},
    "huge multiple": {"type": "integer", "multipleOf": 999_983_000_003},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_schemas_that_cannot_be_enforced_are_refused_in_a_sentence(bench: LocalBench, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": HOSTILE[name]}}
    response = bench.post({"messages": HELLO, "response_format": form, "max_tokens": 20})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 300


BOUNDED: dict[str, Any] = {
    "doubling anyOf": doubling("anyOf"),
    "doubling allOf": doubling("allOf"),
    "nested repetition": {"type": "string", "pattern": "^(a+)+$"},
    "large repetition": {"type": "string", "pattern": "^((a{1,50}){1,50}){1,50}$"},
    "look back": {"type": "string", "pattern": "^(.*a.{12}|.*b.{12})$"},
    "long": {"type": "string", "minLength": 5000, "maxLength": 100_000},
    "many": {"type": "array", "minItems": 10_000, "items": {"type": "integer"}},
}


@pytest.mark.parametrize("name", BOUNDED)
def test_schemas_that_would_cost_much_elsewhere_are_answered_or_refused_soon(bench: LocalBench, name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": BOUNDED[name]}}
    response = bench.post({"messages": HELLO, "response_format": form, "max_tokens": 20})
    assert response.status_code in (200, 400), response.text
    assert response.elapsed.total_seconds() < 20


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "Fly"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.json_schema"),
    ({"response_format": "json"}, "response_format"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_demands_that_make_no_sense_are_refused(bench: LocalBench, fields: dict[str, Any], param: str) -> None:
    response: httpx.Response = bench.post({"messages": HELLO, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(param.split(".")[0])

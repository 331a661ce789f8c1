"""Grammars and automata: every answer that is allowed fits, and what fits is allowed."""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import ConstraintRefused
from openclaw_rl.engines.constraints import Automaton, Compiler
from openclaw_rl.engines.remote.constrained import structural_tag
from openclaw_rl.lab.schema import mismatch
from openclaw_rl.rendering.tool_calls import ParsedToolCall, ToolParser
from openclaw_rl.rendering.tool_formats import FORMATS
from openclaw_rl.types import Constraint, JsonForm, Thinking
from support.constraints import constraint_of
from support.schemas import UndecidedModel, random_object, random_schema

#: Schemas that are tried here; `tests/slow` tries thousands.
SCHEMAS = 300


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> UndecidedModel:
    return UndecidedModel(tiny_model)


def call(name: str, schema: dict[str, Any]) -> JsonForm:
    return JsonForm(json.dumps(schema), f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>")


def test_every_answer_fits_its_schema(model: UndecidedModel) -> None:
    ended = 0
    for seed in range(SCHEMAS):
        schema = random_schema(random.Random(seed))
        text, complete = model.answer(Constraint(JsonForm(json.dumps(schema))), seed)
        if complete:
            ended += 1
            assert not mismatch(json.loads(text), schema), (seed, schema, text)
    assert ended > 0.9 * SCHEMAS


def test_every_call_is_one_that_the_parser_reads_and_fits(model: UndecidedModel) -> None:
    several = 0
    for seed in range(100):
        rng = random.Random(seed)
        schemas = {"one": random_object(rng, 1), "two": random_object(rng, 1)}
        forms = tuple(call(name, schema) for name, schema in schemas.items())
        text, complete = model.answer(Constraint(calls=forms, separator="\n"), seed)
        parser = ToolParser(FORMATS["hermes"])
        parsed = [*parser.push(text), *parser.flush()]
        calls = [part for part in parsed if isinstance(part, ParsedToolCall)]
        several += len(calls) > 1
        assert not complete or len(calls) == len(parsed) > 0
        for part in calls:
            assert not mismatch(json.loads(part.arguments), schemas[part.name])
    assert several


def test_json_is_written_as_templates_write_it(model: UndecidedModel) -> None:
    """So the recorded tokens of a call are found again when the client sends the call back."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
            "b": {"const": {"c": "é"}},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for seed in range(20):
        text, _ = model.answer(Constraint(JsonForm(json.dumps(schema))), seed)
        assert text == json.dumps(json.loads(text), ensure_ascii=False)


def test_reasoning_comes_before_and_only_where_it_may(model: UndecidedModel) -> None:
    form = JsonForm('{"enum": ["yes", "no"]}')
    assert model.answer(Constraint(form), 0)[0] in ('"yes"', '"no"')
    automaton = Automaton.compile(model.vocabulary, Constraint(form, thinking=Thinking.BEGUN)).copy([model.end])
    optional = Automaton.compile(model.vocabulary, Constraint(form, thinking=Thinking.OPTIONAL)).copy([model.end])
    for state, text in (
        (automaton, 'so.</think>\n\n"yes"'),
        (optional, '<think>\nhm </think>"no"'),
        (optional, '"no"'),
    ):
        follower = state.copy([model.end])
        for id in model.vocabulary.tokens.tokenize_str(text):
            assert follower.allowed().mask[id], text
            assert follower.accept(id)
        assert follower.allowed().mask[model.end]
    assert not automaton.allowed().mask[model.end]


def test_text_that_is_certain_is_forced_and_so_is_the_end(model: UndecidedModel) -> None:
    constraint = Constraint(JsonForm('{"enum": ["yes", "no"]}', "Answer: ", "!"))
    automaton = Automaton.compile(model.vocabulary, constraint).copy([model.end, model.end + 1])
    forced = []
    tokens = model.vocabulary.tokens
    for id in tokens.tokenize_str('Answer: "yes"!'):
        allowed = automaton.allowed()
        assert allowed.mask[id]
        assert allowed.forced == (allowed.mask.sum() == 1)
        forced.append((tokens.decode_str([id]), allowed.forced))
        assert automaton.accept(id)
    assert all(is_forced for _, is_forced in forced[:3])
    assert not all(is_forced for _, is_forced in forced)
    end = automaton.allowed()
    assert (end.forced, end.mask.nonzero()[0].tolist()) == (True, [model.end, model.end + 1])


LOOK = call("look", {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]})
FITS, OTHER = f'{LOOK.before}{{"at": 3}}{LOOK.after}', f'{LOOK.before}{{"at": "x"}}{LOOK.after}'


@pytest.mark.parametrize(
    ("text", "separator", "accepted"),
    [
        ("Hello <b> <tool", "\n", True),
        (f"I look.\n{FITS}", "\n", True),
        (f"I look.\n{FITS}\n{FITS} Done.", "\n", True),
        (f"{FITS} Done.", None, True),
        (f"{FITS}\n{FITS}", None, False),
        (OTHER, "\n", False),
        (f"{FITS}\n{OTHER}", "\n", False),
        ("I <tool_call> you", "\n", False),
        ("<think>\n<tool_call> or not?\n</think>\nHello", "\n", True),
        (f"<think>\nhm\n</think>\n{FITS}", "\n", True),
        (f"<think>\nhm\n</think>\n{OTHER}", "\n", False),
        ("<think>\nhm\n</think>\nI <tool_call> you", None, False),
    ],
)
def test_text_with_a_trigger_is_free_and_calls_in_it_fit(
    model: UndecidedModel, text: str, separator: str | None, accepted: bool
) -> None:
    thoughts = (Thinking.OPTIONAL, Thinking.BEGUN) if text.startswith("<think>") else (Thinking.OPTIONAL, Thinking.NONE)
    for thinking in thoughts:
        constraint = Constraint(None, (LOOK,), separator, thinking, "<tool_call>")
        automaton = Automaton.compile(model.vocabulary, constraint).copy([model.end])
        shown = text.removeprefix("<think>") if thinking is Thinking.BEGUN else text
        ids = model.vocabulary.tokens.tokenize_str(shown)
        fits = all(bool(automaton.allowed().mask[id]) and automaton.accept(id) for id in ids)
        assert fits is accepted, thinking
        assert not accepted or automaton.allowed().mask[model.end]


@pytest.mark.parametrize("thinking", Thinking)
@pytest.mark.parametrize("separator", [None, "\n"])
def test_servers_are_told_the_same(separator: str | None, thinking: Thinking) -> None:
    calls = (call("one", {"type": "object"}), call("two", {"type": "object", "required": []}))
    for constraint in (
        Constraint(JsonForm('{"type": "object"}'), thinking=thinking),
        Constraint(None, calls, separator, thinking),
        Constraint(JsonForm('{"type": "object"}'), calls, separator, thinking),
        Constraint(None, calls, separator, thinking, "<tool_call>"),
    ):
        assert constraint_of(structural_tag(constraint)) == constraint


@pytest.fixture
def compiler(tiny_model: Path) -> Iterator[Compiler]:
    compiler = Compiler(tiny_model)
    yield compiler
    compiler.close()


def wide(properties: int) -> Constraint:
    fields = {f"k{n}": {"type": "string"} for n in range(properties)}
    return Constraint(JsonForm(json.dumps({"type": "object", "properties": fields})))


def test_a_constraint_is_compiled_once_and_not_for_ever_kept(compiler: Compiler) -> None:
    small = Constraint(JsonForm('{"type": "boolean"}'))
    first = compiler.future(small).result(60)
    assert compiler.has_result(small)
    assert compiler.automaton(small) is first
    compiler.max_cached = 2
    for number in range(3):
        compiler.future(Constraint(JsonForm(json.dumps({"const": number})))).result(60)
    assert compiler.future(small).result(60) is not first
    compiler.max_cached_bytes = 100
    compiler.future(wide(20)).result(60)
    assert len(compiler._results) == 1


def test_others_run_while_a_large_schema_is_compiled(compiler: Compiler) -> None:
    """The library gives up the interpreter's lock: a second thread is never stopped for long."""
    compiler.prepare()
    longest, stop = [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            longest[0], last = max(longest[0], now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    begun = time.perf_counter()
    with contextlib.suppress(ConstraintRefused):
        compiler.future(wide(1500)).result(60)
    seconds = time.perf_counter() - begun
    stop.set()
    ticking.join()
    assert longest[0] < max(0.3, seconds / 2)


def test_a_request_does_not_wait_for_ever(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile_seconds = 0.0
    gate = threading.Event()
    monkeypatch.setattr(Automaton, "compile", lambda *_given, **_options: gate.wait(60))
    constraint = Constraint(JsonForm("{}"))
    while not compiler.has_result(constraint):
        pass
    with pytest.raises(ConstraintRefused, match="was not compiled within"):
        compiler.automaton(constraint)
    gate.set()


def test_a_call_between_control_tokens_is_written_with_them(model: UndecidedModel) -> None:
    control = model.vocabulary.control["<|im_start|>"]
    spelled = model.vocabulary.tokens.tokenize_str
    form = replace(LOOK, before="<|im_start|>look ", after="")
    demanded = Automaton.compile(model.vocabulary, Constraint(calls=(form,))).copy([model.end])
    assert demanded.allowed().mask.nonzero()[0].tolist() == [control]
    free = Automaton.compile(model.vocabulary, Constraint(calls=(form,), trigger="<|im_start|>")).copy([model.end])
    for text, accepted in (('look {"at": 3}', True), ("hear", False), ('look {"at": "x"}', False)):
        follower = free.copy([model.end])
        ids = [*spelled("I look. "), control, *spelled(text)]
        assert all(follower.accept(id) for id in ids) == accepted
    assert free.allowed().mask[model.end]

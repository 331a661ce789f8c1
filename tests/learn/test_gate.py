"""The examination before a policy serves: what passes, what does not, and what is wrong with the file."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.learn.gate import MAX_ANSWER_TOKENS, MAX_CONCURRENT, Gate, Item, read_item, read_items
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import Priority, SampleRequest
from support.fakes import ScriptedSampler
from support.properties import examples
from support.rank_processes import FastLauncher


@pytest.fixture(scope="module")
def renderer(tiny_model: Path) -> ChatRenderer:
    return ChatRenderer(tiny_model)


def item(**checks: Any) -> Item:
    return read_item(json.dumps({"prompt": "Say hello.", **checks}), "gate.jsonl:1")


@pytest.mark.parametrize(
    ("checks", "good", "bad"),
    [
        ({"contains": "hello"}, "Oh, HELLO world", "good day"),
        ({"contains": ["hello", "world"]}, "hello world", "hello there"),
        ({"excludes": "sorry"}, "hello", "I am Sorry"),
        ({"excludes": ["sorry", "cannot"]}, "hello", "I cannot"),
        ({"matches": r"^\d+$"}, "42", "42 of them"),
        ({"max_words": 2}, "two words", "now three words"),
        ({"min_words": 2}, "two words", "one"),
        ({"contains": "hello", "max_words": 2}, "hello you", "hello to all of you"),
    ],
)
def test_an_answer_passes_all_its_checks_or_fails(checks: dict[str, Any], good: str, bad: str) -> None:
    assert item(**checks).passes(good)
    assert not item(**checks).passes(bad)


@pytest.mark.parametrize("checks", [{"excludes": "sorry"}, {"max_words": 5}, {"matches": ""}])
def test_an_empty_answer_never_passes(checks: dict[str, Any]) -> None:
    assert not item(**checks).passes("")
    assert not item(**checks).passes(" \n")


def gate(renderer: ChatRenderer, says: Callable[[SampleRequest], str], *items: Item, **sampler: Any) -> Gate:
    def script(request: SampleRequest, index: int) -> list[int]:
        return [*renderer.tokenizer.backend.encode(says(request)).ids, next(iter(renderer.tokenizer.eos_ids))]

    return Gate(list(items), 0.0, ScriptedSampler(script, versions=(1, 2, 3, 4), **sampler), renderer)


async def test_the_mark_is_the_share_of_prompts_that_the_asked_version_passes(renderer: ChatRenderer) -> None:
    items = [item(contains="hello"), item(contains="world"), item(max_words=1), item(excludes="fox")]
    examined = gate(renderer, lambda request: "hello world" if request.version == 3 else "the fox", *items)
    assert await examined.examine(3) == 0.75
    assert await examined.examine(4) == 0.0


async def test_answers_are_without_chance_and_stand_behind_users(renderer: ChatRenderer) -> None:
    examined = gate(renderer, lambda request: "hello", item(contains="hello"))
    await examined.examine(2)
    sampler = examined.sampler
    assert isinstance(sampler, ScriptedSampler)
    (asked,) = sampler.requests
    assert (asked.version, asked.params.temperature, asked.priority) == (2, 0.0, Priority.BACKGROUND)
    assert asked.params.max_tokens == MAX_ANSWER_TOKENS
    assert asked.params.stop_token_ids == renderer.tokenizer.eos_ids
    assert "Say hello." in renderer.tokenizer.backend.decode(list(asked.prompt_ids))


async def test_tokens_that_end_an_answer_are_no_part_of_it(renderer: ChatRenderer) -> None:
    assert await gate(renderer, lambda request: "hello", item(matches="^hello$")).examine(1) == 1.0


async def test_a_prompt_may_be_a_conversation(renderer: ChatRenderer) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello?"}]
    examined = gate(renderer, lambda request: "hello", read_item(json.dumps({"prompt": talk, "max_words": 3}), "f:1"))
    assert await examined.examine(1) == 1.0


async def test_an_engine_that_fails_is_no_mark(renderer: ChatRenderer) -> None:
    examined = gate(renderer, lambda request: "hello", item(contains="hello"), item(contains="hello"))
    assert isinstance(examined.sampler, ScriptedSampler)
    examined.sampler.dies_after = 0
    with pytest.raises(EngineUnavailable):
        await examined.examine(1)


async def test_only_so_many_prompts_are_asked_at_once(renderer: ChatRenderer) -> None:
    items = [item(contains="hello")] * (2 * MAX_CONCURRENT + 1)
    examined = gate(renderer, lambda request: "hello", *items, seconds_per_token=0.02)
    assert isinstance(examined.sampler, ScriptedSampler)
    examining = asyncio.create_task(examined.examine(1))
    while not examined.sampler.requests:
        await asyncio.sleep(0)
    assert len(examined.sampler.requests) == MAX_CONCURRENT
    assert await examining == 1.0
    assert len(examined.sampler.requests) == len(items)


@pytest.mark.more
async def test_an_engine_with_a_short_queue_examines_any_number_of_prompts(
    renderer: ChatRenderer, tiny_model: Path
) -> None:
    options = WorkerOptions(tiny_model, "cpu", "float32", 2, None, 0.05, 2, 4)
    sampler = LocalSampler(options, max_queue=0, launcher=FastLauncher())
    await sampler.start()
    try:
        assert await Gate([item(max_words=MAX_ANSWER_TOKENS)] * 5, 0.0, sampler, renderer).examine(0) == 1.0
    finally:
        await sampler.close()


async def test_nothing_is_asked_any_more_once_an_examination_has_failed(renderer: ChatRenderer) -> None:
    examined = gate(renderer, lambda request: "hello", *[item(contains="hello")] * (2 * MAX_CONCURRENT))
    assert isinstance(examined.sampler, ScriptedSampler)
    examined.sampler.dies_after = 0
    with pytest.raises(EngineUnavailable):
        await examined.examine(1)
    asked = len(examined.sampler.requests)
    await asyncio.sleep(0.05)
    assert len(examined.sampler.requests) == asked < 2 * MAX_CONCURRENT


def test_a_file_is_read_line_by_line_and_empty_lines_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "gate.jsonl"
    path.write_text('{"prompt": "hello", "contains": "hello"}\n\n{"prompt": "hi", "max_words": 3}\n')
    assert [(read.messages[0]["content"], read.checks) for read in read_items(path)] == [
        ("hello", {"contains": "hello"}),
        ("hi", {"max_words": 3}),
    ]


TEXTS = "contains is a text or a list of texts."
A_PROMPT = "a prompt is a text or a list of messages."
LINE = 'A line is a prompt with checks, such as {"prompt": "What is the capital of France?", "contains": "Paris"}.'
CHECKS = "contains, excludes, matches, max_words, min_words"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", f" is not JSON. {LINE}"),
        ("[" * 100_000, f" is not JSON. {LINE}"),
        ("[]", f" has no prompt. {LINE}"),
        ("3", f" has no prompt. {LINE}"),
        ('{"contains": "hello"}', f" has no prompt. {LINE}"),
        ('{"prompt": "hello"}', f": give some of {CHECKS}."),
        ('{"prompt": "hello", "contians": "hello"}', f": give some of {CHECKS}, not contians."),
        (
            '{"prompt": "hello", "matches": "("}',
            ": matches is not a regular expression: missing ), unterminated subpattern at position 0.",
        ),
        ('{"prompt": "hello", "matches": 3}', ": matches is a regular expression."),
        ('{"prompt": "hello", "max_words": "five"}', ": max_words is a number."),
        ('{"prompt": "hello", "min_words": null}', ": min_words is a number."),
        ('{"prompt": "hello", "contains": 5}', f": {TEXTS}"),
        ('{"prompt": "hello", "contains": {"a": "b"}}', f": {TEXTS}"),
        ('{"prompt": "hello", "contains": []}', f": {TEXTS}"),
        ('{"prompt": "hello", "excludes": [5]}', ": excludes is a text or a list of texts."),
        ('{"prompt": 5, "contains": "hello"}', f": {A_PROMPT}"),
        ('{"prompt": {"role": "user"}, "contains": "hello"}', f": {A_PROMPT}"),
        ('{"prompt": ["hello"], "contains": "hello"}', f": {A_PROMPT}"),
        ('{"prompt": [], "contains": "hello"}', f": {A_PROMPT}"),
    ],
)
def test_a_line_that_is_no_examination_is_named_at_the_start_and_in_words(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "gate.jsonl"
    path.write_text('{"prompt": "hello", "contains": "hello"}\n' + line + "\n")
    with pytest.raises(ConfigError) as caught:
        read_items(path)
    assert str(caught.value) == f"--gate {path}:2{said}"


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe", None])
def test_a_file_without_an_examination_is_said_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "gate.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--gate: .*gate\.jsonl"):
        read_items(path)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
names = ("contains", "excludes", "matches", "max_words", "min_words")


@given(st.dictionaries(st.sampled_from(names), values, min_size=1), st.text(max_size=12))
@examples(200)
def test_whatever_a_line_says_it_is_refused_or_can_be_examined(checks: dict[str, Any], answer: str) -> None:
    """What is found out only after a step would stop learning."""
    try:
        read = item(**checks)
    except ConfigError:
        return
    assert read.passes(answer) in (True, False)

"""What a request gets that names no sampling parameters of its own."""

import json
from pathlib import Path

import pytest

from openclaw_rl.api.completion import LoopWatch
from openclaw_rl.app.answering import sampling_defaults
from openclaw_rl.app.config import Config
from openclaw_rl.models import EMBEDDED, EMBEDDED_MAX_TOKENS, EMBEDDED_TEMPERATURE
from support.harness import Bench, running
from support.records import Book

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
EMBEDDED_CONFIG = Config.of(backend="local")


def own_model(folder: Path) -> Config:
    return Config.of(backend="local", model_name=str(folder))


def generation_config(folder: Path, **named: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(named))


def test_the_embedded_model_has_a_limit_and_a_temperature(tmp_path: Path) -> None:
    for config in (EMBEDDED_CONFIG, Config.of(backend="local", model_name=EMBEDDED)):
        defaults = sampling_defaults(config, tmp_path)
        assert (defaults.temperature, defaults.max_tokens) == (EMBEDDED_TEMPERATURE, EMBEDDED_MAX_TOKENS)


def test_the_embedded_model_ends_an_answer_that_repeats_itself(tiny_model: Path, tmp_path: Path, book: Book) -> None:
    assert not sampling_defaults(own_model(tmp_path), tmp_path).stops_loops
    defaults = sampling_defaults(EMBEDDED_CONFIG, tmp_path)
    with running(Bench(tiny_model, book.ledger, defaults)) as bench:
        bench.says = "first this: " + "the quick brown fox jumps over the lazy dog. " * 20
        (cut,) = bench.post(HELLO).json()["choices"]
        (asked,) = bench.post({**HELLO, "max_tokens": 4000}).json()["choices"]
        written = bench.script(bench.sampler.requests[0], 0)
    assert cut["finish_reason"] == "length"
    assert 3 <= cut["message"]["content"].count("lazy") <= 7
    assert (asked["finish_reason"], asked["message"]["content"].strip()) == ("stop", bench.says.strip())
    turn = book.read(1)
    assert (turn.finish_reason, turn.message["content"]) == ("length", cut["message"]["content"])
    assert turn.response_ids == written[: len(turn.response_ids)], "as it was sampled"
    assert len(turn.logprobs) == len(turn.response_ids) < len(written)


@pytest.mark.parametrize(
    ("tokens", "is_loop"),
    [
        ([1] * 51, True),
        ([1] * 50, False),
        ([1, 2, 3] * 18, True),
        # A list of 15 zeros, and six equal rows of a table.
        ([1, 2, 3] * 15, False),
        ([*range(9)] * 6, False),
        ([*range(50)] * 3, True),
        ([*range(50), *range(49), 99] * 2, False),
        ([*range(50)] * 2, False),
        ([token for number in range(40) for token in (7, number, 8, 9)], False),
        ([*range(151)] * 3, False),
    ],
)
def test_a_loop_is_a_passage_that_stands_there_three_times_or_a_short_one_more_often(
    tokens: list[int], is_loop: bool
) -> None:
    watch = LoopWatch()
    assert any(watch.push(token) for token in tokens) == is_loop


def test_a_model_of_ones_own_has_neither_unless_it_names_them(tmp_path: Path) -> None:
    defaults = sampling_defaults(own_model(tmp_path), tmp_path)
    assert (defaults.temperature, defaults.max_tokens) == (1.0, None)
    generation_config(tmp_path, temperature=0.6, max_new_tokens=512, top_p=None)
    defaults = sampling_defaults(own_model(tmp_path), tmp_path)
    assert (defaults.temperature, defaults.max_tokens, defaults.top_p) == (0.6, 512, 1.0)


def test_what_the_embedded_model_names_comes_first(tmp_path: Path) -> None:
    generation_config(tmp_path, temperature=0.2, max_new_tokens=64)
    defaults = sampling_defaults(EMBEDDED_CONFIG, tmp_path)
    assert (defaults.temperature, defaults.max_tokens) == (0.2, 64)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_default_limit_holds_unless_the_request_has_one(tiny_model: Path, tmp_path: Path, field: str) -> None:
    generation_config(tmp_path, max_new_tokens=3)
    defaults = sampling_defaults(own_model(tmp_path), tmp_path)
    with running(Bench(tiny_model, defaults=defaults)) as bench:
        bench.says = "the quick brown fox jumps over the lazy dog"
        unsaid = bench.post(HELLO).json()
        asked = bench.post({**HELLO, field: 5}).json()
        whole = bench.post({**HELLO, field: 400}).json()
    assert (unsaid["choices"][0]["finish_reason"], unsaid["usage"]["completion_tokens"]) == ("length", 3)
    assert (asked["choices"][0]["finish_reason"], asked["usage"]["completion_tokens"]) == ("length", 5)
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_the_default_limit_does_not_exceed_the_context(tiny_model: Path, tmp_path: Path) -> None:
    generation_config(tmp_path, max_new_tokens=10**6)
    with running(Bench(tiny_model, defaults=sampling_defaults(own_model(tmp_path), tmp_path))) as bench:
        bench.post(HELLO)
        request = bench.sampler.requests[0]
    assert request.params.max_tokens == bench.sampler.limits.max_context_tokens - len(request.prompt_ids)

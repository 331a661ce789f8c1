"""`/v1/completions`: a text is continued as it is."""

import openai
import pytest

from openclaw_rl.types import State
from support.harness import MODEL
from support.recording import Recording


@pytest.fixture
def bench(recording: Recording) -> Recording:
    recording.says = " world"
    return recording


def test_a_text_is_continued_without_the_template(bench: Recording) -> None:
    answer = bench.client.completions.create(model=MODEL, prompt="<|im_start|>user\nhello", max_tokens=50)
    assert answer.id.startswith("cmpl-")
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [(" world", "stop")]
    assert bench.shown() == "<|im_start|>user\nhello"
    assert answer.usage.prompt_tokens == len(bench.sampler.requests[0].prompt_ids)
    (turn,) = bench.turns()
    assert (turn.completion, turn.message["content"]) == (answer.id, " world")
    assert turn.prompt_ids == list(bench.sampler.requests[0].prompt_ids)
    bench.send("feedback", {"id": answer.id, "thumb": "up"}).raise_for_status()
    assert bench.states() == [State.READY]


def test_a_stream_is_the_same_text_in_pieces(bench: Recording) -> None:
    bench.says = "<think>hm</think> the fox 狐狸"
    asked = {"model": MODEL, "prompt": "hello", "max_tokens": 100, "logprobs": 2, "n": 2}
    whole = bench.client.completions.create(**asked)
    texts, logprobs, ends = ["", ""], [[], []], [None, None]
    chunks = list(bench.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        texts[choice.index] += choice.text
        values = choice.logprobs
        logprobs[choice.index] += zip(values.tokens, values.token_logprobs, values.text_offset, strict=True)
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices] == [bench.says] * 2
    assert ends == ["stop", "stop"]
    for streamed, choice in zip(logprobs, whole.choices, strict=True):
        values = choice.logprobs
        assert streamed == list(zip(values.tokens, values.token_logprobs, values.text_offset, strict=True))
        assert [len(top) for top in values.top_logprobs] == [2] * len(streamed)
    assert chunks[-1].usage == whole.usage


def test_prompts_as_token_ids_and_in_lists(bench: Recording) -> None:
    ids = bench.renderer.tokenizer.backend.encode("hello").ids
    for prompt in (ids, [ids], ["hello"]):
        assert bench.client.completions.create(model=MODEL, prompt=prompt).choices[0].text == " world"
    assert {tuple(request.prompt_ids) for request in bench.sampler.requests} == {tuple(ids)}


def test_without_a_limit_an_answer_is_short(bench: Recording) -> None:
    bench.says = "the lazy dog " * 10
    answer = bench.client.completions.create(model=MODEL, prompt="hello", stop=["never"])
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 16)


def test_a_text_is_no_part_of_a_chat(bench: Recording) -> None:
    """A chat with the same words is rendered by the template, not continued from the text's tokens."""
    bench.client.completions.create(model=MODEL, prompt="hello", max_tokens=50)
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": " world"},
        {"role": "user", "content": "more"},
    ]
    bench.say("yes", messages)
    text, chat = bench.turns()
    assert chat.continuation == "new"
    assert text.next_state is None
    bench.client.completions.create(
        model=MODEL, prompt="hello\n world\nmore", extra_headers={"X-Session-Id": text.session.id}
    )
    assert bench.turns()[0].next_state is None


REFUSALS = [
    ({}, "prompt", "Field required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": ["a", "b"]}, "prompt", "Several prompts"),
    ({"prompt": [10**9]}, "prompt", "token ids"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "echo": True}, "echo", "not supported"),
    ({"prompt": "x", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "x", "logprobs": 6}, "logprobs", "at most 5"),
    ({"prompt": "hello " * 5000}, "prompt", "tokens"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSALS)
def test_refusals_name_the_field(bench: Recording, body: dict, param: str, words: str) -> None:
    response = bench.send("completions", body)
    assert response.status_code == 400
    assert (response.json()["error"]["param"], words in response.json()["error"]["message"]) == (param, True), (
        response.text
    )
    assert not bench.sampler.requests


def test_a_dying_engine_is_an_error_event(bench: Recording) -> None:
    bench.sampler.dies_after = 1
    with pytest.raises(openai.APIError, match="worker died"):
        list(bench.client.completions.create(model=MODEL, prompt="hello", stream=True))

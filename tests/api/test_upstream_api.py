"""A server in front of another API: every wire, what is passed on, what is recorded, and errors."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.upstream.sampler import UpstreamSampler, UpstreamSettings
from openclaw_rl.types import Continuation
from support.chat_api import ChatApi, Said, refusal, words
from support.harness import running, wait_for
from support.upstream_front import Front

KEY = "sk-of-the-owner"
ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
#: Of errors that have one of their own in Anthropic's API.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
PNG = "data:image/png;base64,iVBORw0KGgo="


class Fronted(Front):
    """A server of ours in front of an API that says what a test wants."""

    def __init__(self, api: ChatApi, directory: Path, *others: str) -> None:
        self.api = api
        super().__init__([*others, api.url], directory, key=KEY)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    api = ChatApi()
    with running(Fronted(api, tmp_path_factory.mktemp("ledger"))) as front:
        yield front  # type: ignore[misc]
        front.ledger.close()  # type: ignore[attr-defined]
    api.stop()


@pytest.fixture
def front(shared: Fronted) -> Fronted:
    shared.api.answer = lambda _body: words("hello ", "world")
    shared.api.requests.clear()
    shared.api.headers.clear()
    return shared


def test_chat_is_passed_on_and_streamed_with_the_api_s_numbers(front: Fronted) -> None:
    pieces = front.client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}, max_tokens=9, temperature=0.3
    )
    chunks = list(pieces)
    assert [c.choices[0].delta.content for c in chunks if c.choices][:3] == ["", "hello ", "world"]
    assert chunks[-1].usage.prompt_tokens == 12
    asked = front.api.requests[-1]
    assert asked["model"] == "their-model"
    assert asked["messages"] == ASK
    assert (asked["max_tokens"], asked["temperature"]) == (9, 0.3)
    assert front.api.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert "session_id" not in asked
    assert "store" not in asked


def test_every_wire_speaks_to_an_api_that_speaks_chat(front: Fronted) -> None:
    said = front.anthropic.messages.create(model="tiny", max_tokens=7, system="Be kind.", messages=ASK)
    assert (said.content[0].text, said.stop_reason) == ("hello world", "end_turn")
    assert (said.usage.input_tokens, said.usage.cache_read_input_tokens, said.usage.output_tokens) == (9, 3, 5)
    assert front.api.requests[-1]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert front.api.requests[-1]["max_tokens"] == 7
    response = front.client.responses.create(model="tiny", input="Hi", instructions="Be kind.")
    assert response.output_text == "hello world"
    assert front.client.responses.retrieve(response.id).usage.input_tokens == 12
    follow = front.client.responses.create(model="tiny", input="And?", previous_response_id=response.id)
    assert [m["role"] for m in front.api.requests[-1]["messages"]] == ["user", "assistant", "user"]
    assert follow.output_text == "hello world"
    text = front.client.completions.create(model="tiny", prompt="Once", max_tokens=3)
    assert text.choices[0].text == "hello world"
    assert front.api.paths[-1] == "/v1/completions"
    assert front.api.requests[-1]["prompt"] == "Once"
    refused = front.send("completions", {"prompt": [1, 2]})
    assert refused.status_code == 400
    assert "text" in refused.json()["error"]["message"]


def test_tools_schemas_and_images_are_handed_through(front: Fronted) -> None:
    parts = [{"index": 0, "id": "call_1", "function": {"name": "look", "arguments": '{"at'}}]
    more = [{"index": 0, "function": {"arguments": '": 1}'}}]
    second = [{"index": 1, "id": "call_2", "function": {"name": "look", "arguments": ""}}]
    deltas: list[dict[str, Any]] = [{"reasoning": "hm"}, *({"tool_calls": part} for part in (parts, more, second))]
    front.api.answer = lambda _body: Said(deltas, finish="tool_calls")
    picture = {"type": "image_url", "image_url": {"url": PNG}}
    question = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True}}
    answer = front.client.chat.completions.create(
        model="tiny", messages=[question], tools=[TOOL], tool_choice="required", response_format=schema
    )
    calls = answer.choices[0].message.tool_calls
    assert [(call.id, call.function.arguments) for call in calls] == [("call_1", '{"at": 1}'), ("call_2", "{}")]
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.choices[0].finish_reason == "tool_calls"
    asked = front.api.requests[-1]
    assert asked["messages"] == [question]
    assert asked["tools"] == [TOOL]
    assert asked["tool_choice"] == "required"
    assert asked["response_format"] == schema
    used = front.anthropic.messages.create(
        model="tiny",
        max_tokens=7,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                    {"type": "text", "text": "What is it?"},
                ],
            }
        ],
        tools=[{"name": "look", "input_schema": {"type": "object"}}],
    )
    assert [block.input for block in used.content if block.type == "tool_use"] == [{"at": 1}, {}]
    assert picture in front.api.requests[-1]["messages"][0]["content"]


def test_fields_that_only_the_api_knows_are_handed_through_and_ours_stay_here(front: Fronted) -> None:
    theirs = {"service_tier": "flex", "min_p": 0.1, "provider": {"order": ["x"]}, "user": "u", "prompt": "x"}
    known = {"reasoning_effort": "low", "seed": 3, "logit_bias": {"5": -100}, "top_k": 4, "stop": list("abcde")}
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    ours = {"session_id": "s", "turn_type": "side", "session_done": True, "prompt_cache_key": "k", "store": False}
    answer = front.client.chat.completions.create(
        model="tiny", messages=ASK, extra_body={**theirs, **known, **options, **ours}, max_completion_tokens=9
    )
    assert answer.choices[0].message.content == "hello world"
    own = {"model", "messages", "stream", "stream_options", "max_tokens"}
    asked = front.api.requests[-1]
    assert {name: value for name, value in asked.items() if name not in own} == {**theirs, **known, **options}
    assert front.api.paths[-1] == "/v1/chat/completions"
    schema = {"name": "a", "description": "An answer.", "schema": {"type": "object"}}
    front.post({"messages": ASK, "response_format": {"type": "json_schema", "json_schema": schema}})
    assert front.api.requests[-1]["response_format"]["json_schema"] == schema


def test_images_in_results_of_tools_are_shown_after_them(front: Fronted) -> None:
    picture = {"type": "image_url", "image_url": {"url": PNG}}
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "No picture."}]},
    ]
    calls: list[Any] = [{"type": "tool_use", "id": id, "name": "look", "input": {}} for id in "ab"]
    conversation: list[Any] = [
        *ASK,
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]},
    ]
    front.anthropic.messages.create(model="tiny", max_tokens=7, messages=conversation)
    shown = front.api.requests[-1]["messages"][2:]
    assert [message["role"] for message in shown] == ["tool", "tool", "user", "user"]
    assert all(isinstance(message["content"], str) and message["content"] for message in shown[:2])
    assert picture in shown[2]["content"]
    assert shown[3]["content"] == "And?"
    recorded = front.turns()[-1].messages
    assert recorded[2]["content"] == [picture]
    items: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": PNG}]},
    ]
    front.client.responses.create(model="tiny", input=items)
    assert picture in front.api.requests[-1]["messages"][-1]["content"]
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    seen = {"role": "tool", "content": "", "images": ["iVBORw0KGgo="]}
    body = {"model": "tiny", "messages": [*ASK, called, seen], "stream": False}
    assert httpx.post(f"{front.url}/api/chat", json=body).status_code == 200
    assert picture in front.api.requests[-1]["messages"][-1]["content"]


def test_reasoning_in_tags_and_answers_that_are_not_streamed_are_read(front: Fronted) -> None:
    front.api.answer = lambda _body: words("<think>so", "</think>\n\n", "Yes.", streams=False)
    message = front.client.chat.completions.create(model="tiny", messages=ASK).choices[0].message
    assert (message.reasoning_content, message.content) == ("so", "Yes.")


def test_what_a_model_refuses_is_said(front: Fronted) -> None:
    front.api.answer = lambda _body: Said([{"refusal": "I cannot "}, {"refusal": "help."}])
    message = front.client.chat.completions.create(model="tiny", messages=ASK).choices[0].message
    assert message.content == "I cannot help."


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/messages", "v1/responses", "api/chat"])
def test_the_api_is_told_when_a_client_goes_away(front: Fronted, path: str) -> None:
    front.api.answer = lambda _body: words(*["word "] * 2000, pause=0.005)
    front.api.left.clear()
    asked = {"input": "Hi"} if "responses" in path else {"messages": ASK, "max_tokens": 9}
    with httpx.stream("POST", f"{front.url}/{path}", json={"model": "tiny", "stream": True, **asked}) as answer:
        next(answer.iter_raw())
    wait_for(lambda: front.api.left == ["/v1/chat/completions"])
    assert front.sampler.stats().active == 0


def test_turns_are_recorded_as_text_and_continue_each_other(front: Fronted) -> None:
    before = len(front.turns())
    first = front.post({"messages": [{"role": "user", "content": "Name a bird."}], "n": 2}).json()
    history = [
        {"role": "user", "content": "Name a bird."},
        first["choices"][0]["message"],
        {"role": "user", "content": "Perfect, thanks!"},
    ]
    front.post({"messages": history})
    one, other, last = front.turns()[before:]
    assert one.is_text
    assert other.is_text
    assert not one.response_ids
    assert not one.logprobs
    assert one.message["content"] == "hello world"
    assert last.session == one.session
    assert last.continuation == Continuation.EXTENDS
    wait_for(lambda: any(turn.next_state for turn in front.turns()[before:]))
    assert [m["content"] for t in front.turns()[before:] for m in t.next_state or ()] == ["Perfect, thanks!"]


@pytest.mark.parametrize(
    ("said", "status", "words_in_it"),
    [
        (refusal(401, f"Incorrect API key: {KEY}"), 401, "***. Check UPSTREAM_API_KEY"),
        (refusal(429, "Slow down", **{"Retry-After": "7"}), 429, "Slow down"),
        (refusal(500, "Oops"), 500, "Oops"),
        (refusal(529, "Overloaded"), 529, "Overloaded"),
        (refusal(404, "model 'x' not found"), 404, "not found"),
        (words("half", finish=None), 502, "broke off"),
        (words("late", silent=1.5), 504, "said nothing"),
        (Said([{"content": "a"}], error={"message": "out of memory"}), 502, "out of memory"),
        (Said([{"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}]), 502, "form"),
        (Said([{"content": {"text": "a"}}]), 502, "form"),
    ],
)
def test_errors_of_the_api_reach_clients_in_the_shape_of_their_wire(
    front: Fronted, said: Said, status: int, words_in_it: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    front.api.answer = lambda _body: said
    if said.silent:
        monkeypatch.setattr(front.sampler, "settings", replace(front.sampler.settings, timeout=0.3))
    with pytest.raises(openai.APIStatusError) as raised:
        front.client.chat.completions.create(model="tiny", messages=ASK)
    error = raised.value
    assert error.status_code == status
    assert words_in_it in error.body["message"]
    assert KEY not in str(error.body)
    if status == 429:
        assert error.response.headers["Retry-After"] == "7"
    with pytest.raises(anthropic.APIStatusError) as refused:
        front.anthropic.messages.create(model="tiny", max_tokens=5, messages=ASK)
    assert refused.value.status_code == status
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == ANTHROPIC_TYPES.get(status, "api_error")
    assert words_in_it in refused.value.body["error"]["message"]
    assert len(front.api.requests) == 2, "a request that was sent is not sent again"


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [("86400", 86400, 86400), (format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True), 3000, 3600)],
)
def test_when_to_come_back_is_said_as_the_api_says_it(front: Fronted, given: str, least: int, most: int) -> None:
    front.api.answer = lambda _body: refusal(429, "Slow down", **{"Retry-After": given})
    refused = front.post({"messages": ASK})
    assert refused.status_code == 429
    assert least <= int(refused.headers["Retry-After"]) <= most


def test_no_part_of_the_key_is_repeated(front: Fronted) -> None:
    """An error page and a redirect are cut, perhaps within the key. A code is passed on as it is."""
    page = b"<p>" + b"x" * 190 + KEY.encode()
    cut = Said(status=403, error=page)
    redirect = Said(status=307, error="", headers={"Location": f"http://elsewhere/{'x' * 270}/{KEY}/"})
    code = Said(status=400, error={"message": "No.", "code": KEY})
    for said in (cut, redirect, code):
        front.api.answer = lambda _body, said=said: said  # type: ignore[misc]
        assert KEY[:4] not in front.post({"messages": ASK}).text


def test_a_text_that_is_none_is_refused(front: Fronted) -> None:
    front.api.answer = lambda _body: Said([{"content": {"a": 1}}])
    refused = front.send("completions", {"prompt": "Once"})
    assert refused.status_code == 502
    assert "form" in refused.json()["error"]["message"]


def test_calls_with_numbers_for_ids_are_read(front: Fronted) -> None:
    front.api.answer = lambda _body: Said(
        [{"tool_calls": [{"index": 0, "id": 7, "function": {"name": "look", "arguments": {"at": 1}}}]}], "tool_calls"
    )
    answer = front.client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.arguments) == ("7", '{"at": 1}')


def test_an_answer_that_is_not_streamed_has_a_limit(front: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.client.MAX_EVENT_BYTES", 1000)
    front.api.answer = lambda _body: words("x" * 2000, streams=False)
    refused = front.post({"messages": ASK})
    assert refused.status_code == 502
    assert "longer than 1000 bytes" in refused.json()["error"]["message"]


def test_a_stream_that_breaks_off_ends_with_an_error_event(front: Fronted) -> None:
    front.api.answer = lambda _body: words("half", finish=None)
    lines = front.post({"messages": ASK, "stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[1]["choices"][0]["delta"] == {"content": "half"}
    assert "broke off" in events[-1]["error"]["message"]
    turns_before = len(front.turns())
    streamed = front.send("messages", {"messages": ASK, "max_tokens": 5, "stream": True}).text
    assert "event: error" in streamed
    assert len(front.turns()) == turns_before


def test_fields_that_an_api_calls_otherwise_are_renamed(front: Fronted) -> None:
    first = threading.Barrier(3)

    def strict(body: dict[str, Any]) -> Said:
        if "max_tokens" in body:
            first.wait(30)
            return refusal(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return refusal(400, "Unknown field stream_options") if "stream_options" in body else words("ok")

    front.api.answer = strict
    with ThreadPoolExecutor(3) as clients:
        ask = partial(front.client.chat.completions.create, model="tiny", messages=ASK, max_tokens=5)
        answers = [asked.result() for asked in [clients.submit(ask) for _ in range(3)]]
    assert [answer.choices[0].message.content for answer in answers] == ["ok"] * 3
    assert front.api.requests[-1]["max_completion_tokens"] == 5
    front.sampler._limit_field, front.sampler._asks_usage = "max_tokens", True


def test_a_conversation_that_is_too_long_is_called_so(front: Fronted) -> None:
    front.api.answer = lambda _body: refusal(400, "request (6031 tokens) exceeds the available context size")
    assert front.post({"messages": ASK}).json()["error"]["code"] == "context_length_exceeded"
    refused = front.send("messages", {"messages": ASK, "max_tokens": 5}).json()
    assert refused["error"]["message"].startswith("prompt is too long: ")


def test_log_probs_are_not_pretended(front: Fronted) -> None:
    refused = front.post({"messages": ASK, "logprobs": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "logprobs"


def test_an_api_that_is_away_is_used_again_when_it_is_back(front: Fronted) -> None:
    front.api.stop()
    refused = front.post({"messages": ASK})
    assert refused.status_code == 503
    assert "cannot be reached" in refused.json()["error"]["message"]
    ready = httpx.get(f"{front.url}/readyz")
    assert ready.status_code == 503
    assert "cannot be reached" in ready.json()["detail"]
    front.api.start()
    assert front.post({"messages": ASK}).status_code == 200
    assert httpx.get(f"{front.url}/readyz").status_code == 200


def test_several_urls_are_one_sampler(tmp_path: Path) -> None:
    away, there = ChatApi(), ChatApi(lambda _body: words("from the second"))
    front = Fronted(there, tmp_path, away.url)
    away.stop()
    with running(front):
        assert front.post({"messages": ASK}).json()["choices"][0]["message"]["content"] == "from the second"
    front.ledger.close()
    there.stop()


async def test_a_start_says_what_is_wrong() -> None:
    api = ChatApi()
    api.listing = refusal(401, f"Incorrect API key: {KEY}")
    sampler = UpstreamSampler(UpstreamSettings([api.url], "m", KEY, 5, None, 4, 4))
    with pytest.raises(EngineUnavailable, match=r"answers 401: Incorrect API key: \*\*\*\. Check UPSTREAM_API_KEY"):
        await sampler.start()
    api.stop()
    with pytest.raises(EngineUnavailable, match="--upstream-url"):
        await sampler.start()
    await sampler.close()


async def test_a_url_without_its_end_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    api = ChatApi()
    api.listing = Said(status=404, error=b"404 page not found")
    sampler = UpstreamSampler(UpstreamSettings([api.url.removesuffix("/v1")], "m", "", 5, None, 4, 4))
    await sampler.start()
    await sampler.close()
    api.stop()
    assert "/v1" in caplog.text


async def test_an_api_on_this_machine_is_not_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    api, proxy = ChatApi(), ChatApi()
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy.url.removesuffix("/v1"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for url in (api.url, api.url.replace("127.0.0.1", "localhost")):
        sampler = UpstreamSampler(UpstreamSettings([url], "m", "", 5, None, 4, 4))
        proxy.stop()
        await sampler.start()
        await sampler.close()
    api.stop()

"""The wire: real HTTP and the official client against a scripted model."""

import contextlib
import json
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer

from openclaw_rl.api.options import ApiKey
from openclaw_rl.api.service import Operations
from openclaw_rl.types import SHARED, LineState, SampleRequest
from support.harness import MODEL, Bench, openai_error, running, wait_for

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>'


def test_a_whole_answer(bench: Bench) -> None:
    answer = bench.client.chat.completions.create(model=MODEL, messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello world", "stop")
    prompt = bench.sampler.requests[0].prompt_ids
    said = len(bench.script(bench.sampler.requests[0], 0))
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == said
    assert answer.usage.total_tokens == len(prompt) + said
    assert answer.system_fingerprint == "policy-0"


def test_a_stream_is_the_same_answer_in_pieces(bench: Bench) -> None:
    bench.says = "the quick brown fox 狐狸 jumps"
    chunks = list(
        bench.client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert "".join(pieces) == bench.says
    assert len(pieces) > 3
    assert not any("�" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(bench.script(bench.sampler.requests[0], 0))


def test_a_stream_ends_with_done_and_has_no_usage_unless_asked(bench: Bench) -> None:
    response = bench.post({"messages": HELLO, "stream": True})
    events = [line for line in response.text.split("\n\n") if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert "usage" not in response.text


def test_tokens_leave_when_they_are_sampled(bench: Bench) -> None:
    """No token is drawn before what was drawn has arrived, and yet all of them arrive."""
    bench.says = "the lazy dog " * 10
    bench.sampler.may_send = 1
    arrivals = []
    with httpx.stream("POST", f"{bench.url}/v1/chat/completions", json={"messages": HELLO, "stream": True}) as response:
        for line in response.iter_lines():
            if '"content":"' in line:
                arrivals.append(bench.sampler.sent)
                bench.sampler.may_send = bench.sampler.sent + 1
    assert arrivals[0] == 1
    assert len(set(arrivals)) > 10


def test_n_choices(bench: Bench) -> None:
    bench.says = "answer {index}"
    answer = bench.client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, f"answer {i}") for i in range(3)]
    stream = bench.client.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True)
    texts = {0: "", 1: "", 2: ""}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {i: f"answer {i}" for i in range(3)}


def test_tool_calls_whole_and_streamed(bench: Bench) -> None:
    bench.says = "I will look.\n" + CALL
    answer = bench.client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "I will look."
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "the fox"})
    assert call.id.isalnum()
    deltas = [
        chunk.choices[0].delta.tool_calls[0]
        for chunk in bench.client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, stream=True)
        if chunk.choices[0].delta.tool_calls
    ]
    assert (deltas[0].index, deltas[0].function.name, deltas[0].type) == (0, "look", "function")
    assert deltas[0].id.isalnum()
    assert deltas[0].id != call.id
    assert json.loads("".join(delta.function.arguments for delta in deltas)) == {"at": "the fox"}


@pytest.mark.parametrize("how", [{"tools": TOOLS, "tool_choice": "none"}, {}])
def test_without_tools_a_call_is_text_and_tools_are_not_shown(bench: Bench, how: dict) -> None:
    bench.says = CALL
    answer = bench.post({"messages": HELLO, **how}).json()["choices"][0]
    assert answer["message"]["content"] == CALL
    assert answer["finish_reason"] == "stop"
    shown = bench.renderer.tokenizer.backend.decode(list(bench.sampler.requests[0].prompt_ids))
    assert "look" not in shown


def test_malformed_calls_stay_text(bench: Bench) -> None:
    bench.says = '<tool_call>{"name": look}</tool_call>'
    answer = bench.post({"messages": HELLO, "tools": TOOLS}).json()["choices"][0]
    assert answer["message"]["content"] == bench.says
    assert "tool_calls" not in answer["message"]


def test_reasoning_is_apart_also_when_the_template_opens_it(bench: Bench) -> None:
    bench.says = "<think>\nhm\n</think>\n\nhello"
    message = bench.post({"messages": HELLO}).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "hello")
    bench.says = "hm\n</think>\n\nhello"
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}
    message = bench.post(body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "hello")


def test_stop_strings_end_the_text_before_them(bench: Bench) -> None:
    bench.says = "one two three four"
    answer = bench.post({"messages": HELLO, "stop": ["three", "fo"]}).json()
    assert answer["choices"][0]["message"]["content"] == "one two "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert bench.sampler.sent < len(bench.script(bench.sampler.requests[0], 0))


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_length_limits(bench: Bench, field: str) -> None:
    answer = bench.post({"messages": HELLO, field: 2}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 2


def test_logprobs(bench: Bench) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
    content = bench.post(body).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for token in content[:-1] for b in token["bytes"]).decode() == "hello world"
    assert {token["logprob"] for token in content} == {-0.5}
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    lines = bench.post({**body, "stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [t for c in chunks for choice in c["choices"] for t in (choice["logprobs"] or {}).get("content", [])]
    assert streamed == content


def test_defaults_come_from_the_model_and_requests_override_them(bench: Bench) -> None:
    bench.post({"messages": HELLO})
    bench.post({"messages": HELLO, "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 11})
    given, own = (request.params for request in bench.sampler.requests)
    assert (given.temperature, given.top_p, given.top_k) == (0.6, 1.0, 9)
    assert (own.temperature, own.top_p, own.top_k, own.seed) == (0, 0.5, 3, 11)
    assert given.max_tokens == 4096 - len(bench.sampler.requests[0].prompt_ids)


def test_requests_without_a_seed_draw_differently(bench: Bench) -> None:
    bench.post({"messages": HELLO})
    bench.post({"messages": HELLO})
    one, other = (request.params.seed for request in bench.sampler.requests)
    assert one != other


def test_text_parts_developer_role_and_null_content_are_accepted(bench: Bench) -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": '{"at": 5}'}}
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "a fox"},
    ]
    assert bench.post({"messages": messages, "unknown_field": {"x": 1}, "user": "me"}).status_code == 200
    shown = bench.renderer.tokenizer.backend.decode(list(bench.sampler.requests[0].prompt_ids))
    assert "be kind" in shown
    assert "hello world" in shown
    assert '"arguments": {"at": 5}' in shown


REFUSALS = [
    (b"not json", 400, None),
    (b"[]", 400, None),
    ({"model": MODEL}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, 400, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content"),
    ({"messages": HELLO, "stream_options": "x"}, 400, "stream_options"),
    ({"messages": HELLO, "stream_options": {"include_usage": "x"}}, 400, "stream_options.include_usage"),
    ({"messages": HELLO, "stream": []}, 400, "stream"),
    ({"messages": HELLO, "stop": 5}, 400, "stop"),
    ({"messages": HELLO, "stream": "yes"}, 400, "stream"),
    ({"messages": HELLO, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    ({"messages": HELLO, "max_tokens": "3"}, 400, "max_tokens"),
    ({"messages": HELLO, "max_completion_tokens": 3.0}, 400, "max_completion_tokens"),
    ({"messages": HELLO, "temperature": -1}, 400, "temperature"),
    ({"messages": HELLO, "temperature": 2.1}, 400, "temperature"),
    ({"messages": HELLO, "temperature": "1"}, 400, "temperature"),
    ({"messages": HELLO, "n": 0}, 400, "n"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, 400, "tools.0.function"),
    ({"messages": HELLO, "presence_penalty": 0.1}, 400, "presence_penalty"),
    ({"messages": HELLO, "frequency_penalty": -1}, 400, "frequency_penalty"),
    ({"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    ({"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format"),
    ({"messages": HELLO, "response_format": "json"}, 400, "response_format"),
    ({"messages": HELLO, "logit_bias": {"50256": -100}}, 400, "logit_bias"),
    ({"messages": HELLO, "functions": [{"name": "look"}]}, 400, "functions"),
    ({"messages": HELLO, "function_call": {"name": "look"}}, 400, "function_call"),
    ({"messages": HELLO, "modalities": ["text", "audio"]}, 400, "modalities"),
    ({"messages": HELLO, "audio": {"voice": "alloy", "format": "wav"}}, 400, "audio"),
    ({"messages": HELLO, "top_logprobs": 3}, 400, "top_logprobs"),
    ({"messages": HELLO, "stop": ["a", "b", "c", "d", "e"]}, 400, "stop"),
    ({"messages": HELLO, "model": "gpt-99"}, 404, "model"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSALS)
def test_refusals_name_status_and_field(bench: Bench, body: object, status: int, param: str | None) -> None:
    response = bench.post(body)
    assert (response.status_code, openai_error(response)["param"]) == (status, param)
    assert not bench.sampler.requests


def test_what_is_not_supported_may_be_named_if_it_asks_for_nothing(bench: Bench) -> None:
    penalties = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    functions = {"functions": [], "function_call": None}
    kinds = {"response_format": {"type": "text"}, "modalities": ["text"], "audio": None}
    assert bench.post({"messages": HELLO, **penalties, **functions, **kinds}).status_code == 200


def test_a_client_that_wants_its_answer_parsed_is_told_that_it_cannot_be(bench: Bench) -> None:
    class Tip(BaseModel):
        text: str

    with pytest.raises(openai.BadRequestError, match="cannot restrict answers"):
        bench.client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Tip)


def test_too_long_a_conversation_is_context_length_exceeded(bench: Bench) -> None:
    response = bench.post({"messages": [{"role": "user", "content": "hello " * 5000}]})
    assert response.status_code == 400
    assert openai_error(response)["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        bench.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello " * 5000}])


def test_a_full_queue_is_429_with_retry_after(bench: Bench) -> None:
    bench.sampler.full = True
    response = bench.post({"messages": HELLO})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert openai_error(response)["type"] == "rate_limit_error"


def test_a_dying_engine_is_503_or_an_error_event(bench: Bench) -> None:
    bench.sampler.dies_after = 2
    response = bench.post({"messages": HELLO})
    assert response.status_code == 503
    assert openai_error(response)["type"] == "server_error"
    with pytest.raises(openai.APIError, match="worker died"):
        list(bench.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))


def test_numbers_beyond_all_bounds_are_bounded(bench: Bench) -> None:
    assert bench.post({"messages": HELLO, "top_k": 10**30, "seed": 10**40, "max_tokens": 10**20}).status_code == 200
    assert bench.sampler.requests[0].params.top_k < 2**31
    refused = bench.post({"messages": HELLO, "n": 100})
    assert (refused.status_code, openai_error(refused)["param"]) == (400, "n")


def test_an_engine_that_dies_before_the_first_token_is_a_503_also_for_streams(bench: Bench) -> None:
    bench.sampler.dies_after = 0
    response = bench.post({"messages": HELLO, "stream": True})
    assert response.status_code == 503
    openai_error(response)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ({"image_url": {"url": "data:image/png;base64,AAAA"}}, "this model cannot see images; send text only."),
        ({"image_url": {"url": "http://a/b.png", "detail": "low"}}, "this model cannot see images; send text only."),
        ({}, "an image is {"),
        ({"image_url": "data:,"}, "an image is {"),
        ({"image_url": {"url": ""}}, "an image is {"),
        ({"image_url": {"url": 5}}, "an image is {"),
    ],
)
def test_an_image_is_refused_in_a_sentence(bench: Bench, image: dict[str, object], sentence: str) -> None:
    content = [{"type": "text", "text": "Look:"}, {"type": "image_url", **image}]
    response = bench.post({"messages": [*HELLO, {"role": "user", "content": content}]})
    assert (response.status_code, openai_error(response)["param"]) == (400, "messages.1.content")
    assert openai_error(response)["message"].startswith(f"messages.1.content: {sentence}")
    assert not bench.sampler.requests


def test_refusals_are_counted(bench: Bench) -> None:
    def refused() -> float:
        lines = httpx.get(f"{bench.url}/metrics").text.splitlines()
        return next(
            float(line.split()[-1]) for line in lines if line.startswith('openclaw_requests_total{status="refused"}')
        )

    before = refused()
    bench.post(b"no")
    bench.post({"messages": HELLO, "model": "other"})
    assert refused() - before == 2


def test_a_wrong_method_names_the_right_one(bench: Bench) -> None:
    response = httpx.get(f"{bench.url}/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert openai_error(response)["message"] == "There is no GET /v1/chat/completions here, only POST."


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("GET", "/models/owner/tiny", "/v1/models/owner/tiny"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/v1/readyz", "/readyz"),
        ("POST", "/v1/chat/completions/", "/v1/chat/completions"),
        ("POST", "/chat/completions//", "/v1/chat/completions"),
        ("GET", "/healthz/", "/healthz"),
    ],
)
def test_a_path_with_a_wrong_base_names_the_right_one(bench: Bench, method: str, path: str, meant: str) -> None:
    response = httpx.request(method, bench.url + path, json={"messages": HELLO} if method == "POST" else None)
    assert response.status_code == 404
    assert openai_error(response)["message"] == f"There is no {method} {path} here; did you mean {meant}?"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/batches", "/"])
def test_a_path_that_is_nowhere_names_those_that_are(bench: Bench, path: str) -> None:
    refused = openai_error(httpx.post(bench.url + path, json={"prompt": "hello"}))
    assert (refused["type"], refused["code"]) == ("not_found_error", "unknown_url")
    assert refused["message"].startswith(f"There is no POST {path} here; this server has POST /v1/chat/completions, ")
    for route in ("POST /v1/feedback", "POST /v1/sessions/{name}/close", "GET /v1/models", "GET /healthz"):
        assert route in refused["message"]


def test_a_client_without_v1_is_told_so(bench: Bench) -> None:
    client = openai.OpenAI(base_url=bench.url, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="did you mean /v1/chat/completions"):
        client.chat.completions.create(model=MODEL, messages=HELLO)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_generation(bench: Bench, stream: bool) -> None:
    bench.says = "the quick brown fox " * 50
    bench.sampler.seconds_per_token = 0.01
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST",
            f"{bench.url}/v1/chat/completions",
            json={"messages": HELLO, "stream": stream},
            timeout=httpx.Timeout(5, read=0.3),
        ) as response,
    ):
        for _line in response.iter_lines():
            break
    wait_for(lambda: bench.sampler.open == 0)
    assert bench.sampler.sent < 100


def test_models_health_and_unknown_routes(bench: Bench) -> None:
    assert [model.id for model in bench.client.models.list()] == [MODEL]
    assert bench.client.models.retrieve("owner/tiny").id == MODEL
    assert httpx.get(f"{bench.url}/healthz").status_code == 200
    assert httpx.get(f"{bench.url}/readyz").json()["ready"] is True
    for path, status in (("/v1/models/other", 404), ("/v1/nothing", 404), ("/v1/chat/completions", 405)):
        response = httpx.get(bench.url + path)
        assert response.status_code == status
        openai_error(response)


def test_metrics_count_requests_and_tokens(bench: Bench) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{bench.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    names = ('openclaw_requests_total{status="ok"}', 'openclaw_tokens_total{kind="completion"}')
    before = [value(name) for name in names]
    said = bench.post({"messages": HELLO}).json()["usage"]["completion_tokens"]
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [1, said]
    assert value("openclaw_time_to_first_token_seconds_count") > 0


def test_an_unexpected_failure_is_a_500_without_a_traceback(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.service.renderer, "text", lambda *_: 1 / 0)
    response = bench.post({"messages": HELLO})
    assert response.status_code == 500
    assert "Zero" not in openai_error(response)["message"]


def test_keys_are_needed_where_they_are_set(tiny_model: Path) -> None:
    keys = [ApiKey("alice", "s3cret-a"), ApiKey("bob", "s3cret-b")]
    with running(Bench(tiny_model, keys=keys, max_body_bytes=10_000)) as bench:
        assert bench.post({"messages": HELLO}).status_code == 401
        wrong = bench.post({"messages": HELLO}, Authorization="Bearer s3cret-c")
        assert wrong.status_code == 401
        assert "s3cret" not in wrong.text
        assert openai_error(wrong)["code"] == "invalid_api_key"
        for key in keys:
            assert bench.post({"messages": HELLO}, Authorization=f"Bearer {key.secret}").status_code == 200
        # The engine shares no cached prompts between them.
        assert [request.owner for request in bench.sampler.requests] == ["alice", "bob"]
        assert httpx.get(f"{bench.url}/metrics").status_code == 401
        # Clients look for models before they have a key.
        assert httpx.get(f"{bench.url}/v1/models").status_code == 200
        large = {"messages": [{"role": "user", "content": "x" * 20_000}]}
        refused = bench.post(large, Authorization="Bearer s3cret-a")
        assert refused.status_code == 413
        openai_error(refused)


def test_only_the_first_key_operates_the_server(tiny_model: Path) -> None:
    keys = [ApiKey("admin", "s3cret-a"), ApiKey("bob", "s3cret-b")]
    with running(Bench(tiny_model, keys=keys)) as bench:

        def ask(method: str, path: str, secret: str = "") -> httpx.Response:
            return httpx.request(
                method, bench.url + path, headers={"Authorization": f"Bearer {secret}"} if secret else {}
            )

        calls = (("POST", "/v1/policy/rollback", 409), ("GET", "/metrics", 200), ("DELETE", "/v1/lines/", 404))
        for method, path, allowed in calls:
            assert ask(method, path).status_code == 401
            refused = ask(method, path, "s3cret-b")
            assert (refused.status_code, openai_error(refused)["type"]) == (403, "permission_error")
            assert "--admin-key" in openai_error(refused)["message"]
            assert ask(method, path, "s3cret-a").status_code == allowed
        for secret in ("", "s3cret-c"):
            assert ask("GET", "/readyz", secret).json() == {"ready": True}
        for secret in ("s3cret-a", "s3cret-b"):
            assert ask("GET", "/readyz", secret).json()["capture"] == "off"
        bench.sampler.closed = True
        assert (ask("GET", "/readyz").status_code, ask("GET", "/readyz").json()) == (503, {"ready": False})


class TwoLines(Operations):
    has_lines = True
    line_of = staticmethod(str)
    learner = staticmethod(lambda: "suspended: the line anna: no disk")
    line_states = staticmethod(lambda: [LineState(name, 1, 1, 0, 2, False, "no disk", "") for name in (SHARED, "anna")])


def test_whoever_does_not_operate_the_server_is_told_of_their_own_line(tiny_model: Path) -> None:
    keys = [ApiKey(name, name) for name in ("admin", "anna", "carl")]
    with running(Bench(tiny_model, keys=keys, operations=TwoLines())) as bench:
        for who, status in (("admin", "the line anna: "), ("anna", "suspended: no disk"), ("carl", "0 of the 2 ")):
            told = httpx.get(f"{bench.url}/readyz", headers={"Authorization": f"Bearer {who}"})
            assert status in told.json()["learner"]
            assert ("anna" in told.text) == (who != "carl")


class ChannelBench(Bench):
    """Its model writes control tokens."""

    def script(self, request: SampleRequest, index: int) -> list[int]:
        return self.renderer.tokenizer.encode_chat(self.says)


def test_channels_of_gpt_oss_over_http(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{{ tools | tojson }}{# <|channel|>analysis<|message|> #}"
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}<|start|>assistant"
    )
    with running(ChannelBench(folder)) as bench:
        bench.says = (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.look "
            '<|constrain|>json<|message|>{"at": 1}<|call|>'
        )
        answer = bench.client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("look", '{"at": 1}')]
        assert message.to_dict()["reasoning_content"] == "hm"
        bench.says = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hello"
        stream = bench.client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "hello"

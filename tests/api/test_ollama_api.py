"""Ollama's own wire in front of a model: chats, prompts, lines of JSON, and what clients ask before they begin."""

import json
from typing import Any

import httpx
import pytest

from support.harness import Bench
from support.recording import Recording

ASK = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def send(bench: Bench, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{bench.url}/api/{path}", json={"model": "tiny", **body})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["Content-Type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat_is_streamed_as_lines_of_json(bench: Bench) -> None:
    *pieces, last = lines(send(bench, "chat", messages=ASK, options={"temperature": 0.2, "num_predict": 30}))
    assert "".join(piece["message"]["content"] for piece in pieces) == "hello world"
    assert [piece["done"] for piece in (*pieces, last)] == [False] * len(pieces) + [True]
    assert last["done_reason"] == "stop"
    assert last["prompt_eval_count"] > 0
    assert last["eval_count"] == len(bench.script(bench.sampler.requests[-1], 0))
    params = bench.sampler.requests[-1].params
    assert (params.temperature, params.max_tokens) == (0.2, 30)


def test_whole_answers_of_chats_and_prompts(bench: Bench) -> None:
    chat = send(bench, "chat", messages=ASK, stream=False).json()
    assert chat["message"] == {"role": "assistant", "content": "hello world"}
    prompt = send(bench, "generate", model="tiny:latest", prompt="Hi", system="Be kind.", stream=False).json()
    assert prompt["response"] == "hello world"
    assert prompt["done"]
    assert "Be kind." in bench.shown()


def test_calls_have_objects_as_arguments_and_results_find_their_calls(bench: Bench) -> None:
    bench.says = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    message = send(bench, "chat", messages=ASK, tools=[TOOL], stream=False).json()["message"]
    assert message["tool_calls"] == [{"function": {"name": "look", "arguments": {"at": 1}}}]
    bench.says = "A cat."
    result = {"role": "tool", "tool_name": "look", "content": "a cat"}
    answer = send(bench, "chat", messages=[*ASK, message, result], tools=[TOOL], stream=False).json()
    assert answer["message"]["content"] == "A cat."
    assert "a cat" in bench.shown()


def test_a_conversation_is_recorded_and_continued(recording: Recording) -> None:
    message = send(recording, "chat", messages=ASK, stream=False).json()["message"]
    send(recording, "chat", messages=[*ASK, message, {"role": "user", "content": "Thanks!"}])
    first, second = recording.turns()
    assert first.session == second.session
    assert second.continuation == "realigned"


def test_what_clients_ask_before_they_begin(bench: Bench) -> None:
    (model,) = httpx.get(f"{bench.url}/api/tags").json()["models"]
    assert model["name"] == "tiny"
    shown = send(bench, "show").json()
    assert shown["model_info"]["openclaw.context_length"] == bench.sampler.limits.max_context_tokens
    assert httpx.get(f"{bench.url}/api/version").json()["version"]


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"messages": []}, 400, "messages"),
        ("chat", {"messages": ASK, "model": "other"}, 404, "does not exist"),
        ("generate", {"prompt": "x", "raw": True}, 400, "raw is not supported"),
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["/9j/"]}]}, 400, "cannot see images"),
        ("show", {"model": "other"}, 404, "does not exist"),
        ("nothing", {}, 404, "There is no"),
    ],
)
def test_errors_have_ollamas_shape(bench: Bench, path: str, body: dict[str, Any], status: int, words: str) -> None:
    refused = send(bench, path, **body)
    assert refused.status_code == status
    assert set(refused.json()) == {"error"}
    assert words in refused.json()["error"]

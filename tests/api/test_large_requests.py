"""Requests that are large or hostile: refused early, and others are served meanwhile."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openclaw_rl.api import reader as body_module
from openclaw_rl.api.reader import MAX_INLINE_BYTES, MAX_SMALL_BODY_BYTES, MAX_VALUES, count_values, separators
from support.harness import Bench, running, wait_for

MEDIUM, LARGE = "x" * (2 * MAX_INLINE_BYTES), "x" * (2 * MAX_SMALL_BODY_BYTES)


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Iterator[Bench]:
    with running(Bench(tiny_model, max_body_bytes=4_000_000)) as bench:
        yield bench


def asking(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def refusal(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("word", ["the fox ", "<|im_end|>", "x", " ", "狐"])
def test_a_request_that_is_much_too_long_is_refused(bench: Bench, word: str) -> None:
    response = bench.post(asking(word * (1_000_000 // len(word.encode()))))
    assert refusal(response) == (400, "context_length_exceeded")
    assert "more than 8192 tokens; this model's limit is 4096" in response.json()["error"]["message"]


def test_a_body_that_no_context_has_room_for_is_not_parsed(bench: Bench) -> None:
    assert refusal(bench.post(b"x" * (512 * 4096 + 1))) == (400, "context_length_exceeded")
    assert refusal(bench.post(b"x" * 4_000_001))[0] == 413


@pytest.mark.parametrize(
    "body",
    [
        asking("hi", chat_template_kwargs={"a": [[]] * MAX_VALUES}),
        asking("hi", unknown=[1] * (MAX_VALUES + 1)),
        {"messages": [{}] * MAX_VALUES},
        {"messages": [{"role": "user", "content": ""}] * MAX_VALUES},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": json.dumps([0] * 9000)}}] * 6,
                }
            ]
        },
    ],
    ids=["template", "ignored", "wrong messages", "messages", "arguments"],
)
def test_too_many_values_are_refused(bench: Bench, body: dict[str, Any]) -> None:
    assert refusal(bench.post(body)) == (400, "too_many_values")


def test_signs_in_a_text_are_no_values(bench: Bench) -> None:
    assert refusal(bench.post(asking(',[{\\"' * MAX_VALUES))) == (400, "context_length_exceeded")


@given(
    st.recursive(
        st.text('",[{\\a') | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text('"{\\'), inner)
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_are_counted_outside_of_strings(monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    text = json.dumps([value])

    def blank(inner: Any) -> Any:
        if isinstance(inner, str):
            return ""
        if isinstance(inner, list):
            return [blank(item) for item in inner]
        return {str(i): blank(item) for i, item in enumerate(inner.values())} if isinstance(inner, dict) else inner

    monkeypatch.setattr(body_module, "MAX_VALUES", separators(text.encode()) - 1)
    assert count_values(text.encode()) == separators(json.dumps([blank(value)]).encode())


@pytest.mark.parametrize("text", [b'"\\', b'["a', b'[",', b'"\\\\",[', b"\\"])
def test_broken_json_is_counted_too(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(body_module, "MAX_VALUES", 0)
    assert count_values(text) <= separators(text)


def test_only_the_first_of_many_mistakes_is_reported(bench: Bench) -> None:
    response = bench.post({"messages": [{}] * 10_000})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "messages.0.role: Field required."


class BlockingBackend:
    """A tokenizer that takes until `go` is set for long texts."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.go, self.waiting = inner, threading.Event(), 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        if len(texts[0]) > MAX_INLINE_BYTES:
            self.waiting += 1
            assert self.go.wait(30)
        return self.inner.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_others_are_served_while_long_requests_are_tokenised(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as bench, ThreadPoolExecutor(8) as clients:
        tokenizer = bench.renderer.tokenizer
        backend = tokenizer.backend = BlockingBackend(tokenizer.backend)
        large = [clients.submit(bench.post, asking(LARGE)) for _ in range(3)]
        wait_for(lambda: backend.waiting == 1)
        assert httpx.get(f"{bench.url}/healthz").status_code == 200
        assert bench.post(asking("hello")).status_code == 200
        medium = clients.submit(bench.post, asking(MEDIUM))
        wait_for(lambda: backend.waiting == 2)
        assert "[DONE]" in bench.post(asking("hello", stream=True)).text
        backend.go.set()
        assert [refusal(future.result())[1] for future in large] == ["context_length_exceeded"] * 3
        assert medium.result().status_code in (200, 400)


def test_large_bodies_have_a_bounded_size_together(tiny_model: Path) -> None:
    with running(Bench(tiny_model, max_body_bytes=100_000)) as bench:
        bench.app.state.server.bodies.max_large_bodies = 1
        url = httpx.URL(bench.url)
        with contextlib.closing(socket.create_connection((url.host, url.port))) as slow:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000\r\n\r\n"
            slow.sendall(head + b" " * 90_000)
            bodies = bench.app.state.server.bodies
            wait_for(lambda: bodies._held == 90_000)
            refused = bench.post(asking("x" * 20_000))
            assert refusal(refused) == (429, "too_many_large_requests")
            assert refused.headers["retry-after"] == "1"
            assert bench.post(asking("hello")).status_code == 200
        wait_for(lambda: bodies._held == 0)
        assert refusal(bench.post(asking("狐" * 15_000)))[1] == "context_length_exceeded"

"""Connections that send nothing, too little or no HTTP: real sockets, short limits."""

import contextlib
import json
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from openclaw_rl.api.options import ServerOptions
from openclaw_rl.app.connections import ConnectionLimits, connection_limits, connection_type
from support.harness import Bench, running, wait_for

SECONDS = 0.3
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST_CHUNK = b"\r\n0\r\n\r\n"


@contextlib.contextmanager
def limited(folder: Path, total: int = 50, per_address: int = 50, seconds: float = SECONDS) -> Iterator[Bench]:
    limits = ConnectionLimits(total, per_address, head_seconds=seconds, body_seconds=seconds)
    with running(Bench(folder), http=connection_type(limits)) as bench:
        yield bench


@pytest.fixture(scope="module")
def bench(tiny_model: Path) -> Iterator[Bench]:
    with limited(tiny_model) as bench:
        yield bench


@contextlib.contextmanager
def connected(bench: Bench, *data: bytes, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    url = httpx.URL(bench.url)
    with socket.create_connection((url.host, url.port), timeout=10, source_address=(source, 0)) as client:
        for part in data:
            client.sendall(part)
        yield client


def answer(client: socket.socket) -> tuple[int, dict]:
    """The status and the error, up to where the server closes the connection."""
    received = b"".join(iter(lambda: client.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), error


def is_served(client: socket.socket) -> bool:
    client.sendall(HEALTH)
    return client.recv(65536).startswith(b"HTTP/1.1 200")


def is_closed(client: socket.socket) -> bool:
    """Whether the server has closed this connection, on which nothing else is waiting to be read."""
    readable, _, _ = select.select([client], [], [], 0)
    return bool(readable)


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: loc", b"\r\n"])
def test_headers_that_do_not_arrive_are_a_408(bench: Bench, sent: bytes) -> None:
    with connected(bench, sent) as client:
        status, error = answer(client)
    assert (status, error["code"]) == (408, "too_slow")
    assert error["message"] == "The request's headers did not arrive within 0.3 seconds."


def test_headers_that_arrive_byte_by_byte_are_late_too(bench: Bench) -> None:
    began = time.monotonic()
    with connected(bench) as client, contextlib.suppress(OSError):
        while time.monotonic() - began < 10 * SECONDS:
            client.sendall(b"X")
            time.sleep(SECONDS / 10)
    assert time.monotonic() - began < 5 * SECONDS


@pytest.mark.parametrize("sent", [b"", b'{"messages"'])
def test_a_body_that_does_not_arrive_is_a_408(bench: Bench, sent: bytes) -> None:
    with connected(bench, HEAD, sent) as client:
        status, error = answer(client)
    assert (status, error["message"]) == (408, "The request's body did not arrive within 0.3 seconds.")


def test_nothing_limits_how_long_an_answer_takes(bench: Bench) -> None:
    bench.says = "the lazy dog " * 20
    bench.sampler.seconds_per_token = 0.02
    began = time.monotonic()
    with httpx.Client(base_url=bench.url) as client:
        for stream in (True, False):
            body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
            assert "dog" in client.post("/v1/chat/completions", json=body).text
    assert time.monotonic() - began > 4 * SECONDS
    bench.sampler.seconds_per_token = 0.0


def test_a_request_behind_a_slow_answer_is_not_late(bench: Bench) -> None:
    """The server does not read it before it has answered the first one."""
    bench.says = "the lazy dog " * 20
    bench.sampler.seconds_per_token = 0.02
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    first = HEAD.replace(b"100", str(len(body)).encode()) + body
    with connected(bench, first + HEALTH[:20]) as client:
        time.sleep(2 * SECONDS)
        bench.sampler.seconds_per_token = 0.0
        client.sendall(HEALTH[20:])
        received = b""
        while b'{"status":"ok"}' not in received:
            part = client.recv(65536)
            assert part, received
            received += part
    assert received.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00garbage\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_an_error_that_clients_understand(bench: Bench, sent: bytes) -> None:
    with connected(bench, sent) as client:
        status, error = answer(client)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")


def test_headers_have_a_bounded_size(bench: Bench) -> None:
    with connected(bench, HEALTH[:-2], b"X-Long: " + b"x" * 66_000) as client:
        assert answer(client)[0] == 431
    assert httpx.get(f"{bench.url}/healthz", headers={"X-Long": "x" * 20_000}).status_code == 200


def test_clients_that_send_nothing_shut_nobody_out(tiny_model: Path) -> None:
    with limited(tiny_model, total=4, seconds=60) as bench, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(bench, b"GET")) for _ in range(12)]
        for client in idle[:8]:
            assert client.recv(1) == b"", "the oldest made room"
        assert is_served(stack.enter_context(connected(bench)))


def test_a_body_that_ends_after_its_answer_leaves_a_connection_that_can_be_displaced(tiny_model: Path) -> None:
    """Its client is next to send something, so it must not count as busy."""
    head = HEALTH.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\n\r\n")
    with limited(tiny_model, total=1, seconds=60) as bench, connected(bench, head) as idle:
        assert idle.recv(65536).startswith(b"HTTP/1.1 200")
        idle.sendall(b"x")
        wait_for(lambda: served_by_another(bench))


def served_by_another(bench: Bench) -> bool:
    with connected(bench) as client:
        return is_served(client)


def test_connections_that_are_answered_keep_their_place(tiny_model: Path) -> None:
    with limited(tiny_model, total=3, seconds=60) as bench, contextlib.ExitStack() as stack:
        bench.says, bench.sampler.seconds_per_token = "the lazy dog " * 20, 0.05
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
        request = HEAD.replace(b"100", str(len(body)).encode()) + body
        busy = [stack.enter_context(connected(bench, request)) for _ in range(3)]
        wait_for(lambda: bench.sampler.open == 3)
        status, error = answer(stack.enter_context(connected(bench)))
        assert (status, error["code"], error["type"]) == (503, "too_many_connections", "server_error")
        bench.sampler.seconds_per_token = 0.0
        for client in busy:
            received = b""
            while not received.endswith(LAST_CHUNK):
                received += client.recv(65536)
        assert is_served(stack.enter_context(connected(bench))), "an answered connection makes room"
        kept = [client for client in busy if not is_closed(client)]
        assert len(kept) == 2, "one made room; which one depends on the order of the answers"
        assert all(is_served(client) for client in kept), "a connection is kept for the next request"


def test_one_address_does_not_take_all_places(tiny_model: Path) -> None:
    with limited(tiny_model, total=10, per_address=2, seconds=60) as bench, contextlib.ExitStack() as stack:
        other = stack.enter_context(connected(bench, source="127.0.0.2"))
        many = [stack.enter_context(connected(bench)) for _ in range(5)]
        assert [client.recv(1) for client in many[:3]] == [b""] * 3
        assert is_served(other)
        assert is_served(many[4])


def test_connections_follow_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, connections in ((1024, 824), (100, 50), (1 << 20, 1000), (resource.RLIM_INFINITY, 1000)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert connection_limits(ServerOptions()).total == connections

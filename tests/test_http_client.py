"""The HTTP client against servers that answer well, oddly, or not at all."""

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from openclaw_rl import client as api_client
from openclaw_rl import http_client
from openclaw_rl.engines.remote.http import InferenceServer, InferenceServerGone, RequestRefused
from openclaw_rl.envs.connection import PolicyServer
from openclaw_rl.errors import UserError
from openclaw_rl.http_client import ConnectFailed, HttpClient, HttpError

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Peer:
    """A server on a socket: what each connection received, and when it was closed."""

    def __init__(self, *answers: bytes | Answer) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = self.open = 0
        self.closed, self.all_closed = asyncio.Event(), asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
                if isinstance(answer, bytes):
                    writer.write(answer)
                else:
                    await answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()
            self.open -= 1
            if not self.open:
                self.all_closed.set()


@asynccontextmanager
async def peer(*answers: bytes | Answer) -> AsyncIterator[Peer]:
    running = Peer(*answers)
    server = await asyncio.start_server(running.serve, "127.0.0.1", 0)
    running.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield running
    finally:
        server.close()


@asynccontextmanager
async def client_of(server: Peer, path: str = "", **headers: str) -> AsyncIterator[HttpClient]:
    client = HttpClient(server.url + path, headers, keepalive_seconds=3.0, connect_seconds=5.0)
    async with asyncio.timeout(30):
        yield client
    await client.close()


async def test_a_request_is_what_a_server_expects_and_connections_are_kept() -> None:
    async with peer(OK) as server, client_of(server, "/base/", Key="secret") as client:
        for _ in range(3):
            answer = await client.request("POST", "/x?y=1", b'{"a": 1}', {"X-Session-Id": "s"})
            assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"hi", "2")
        assert server.connections == 1
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        assert lines[0] == "POST /base/x?y=1 HTTP/1.1"
        assert {f"Host: {server.url[7:]}", "Key: secret", "X-Session-Id: s", "Content-Length: 8"} <= set(lines)
        assert body == b'{"a": 1}'


async def test_a_kept_connection_is_not_used_when_it_is_old_or_closed() -> None:
    async with peer(OK) as server:
        client = HttpClient(server.url, {}, keepalive_seconds=0.0)
        for _ in range(2):
            await client.request("GET", "/")
        assert server.connections == 2

    async def hang_up(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        writer.close()

    async with peer(hang_up, OK) as server, client_of(server) as client:
        await client.request("GET", "/")
        while client._idle[0].is_reusable:
            await asyncio.sleep(0)
        assert (await client.request("GET", "/")).content == b"hi"


def test_a_connection_that_the_server_has_just_closed_is_not_used() -> None:
    """Its end has arrived, and the event loop has not looked since."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)

        def answer_once_each() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(OK)
                closed.set()

        closed = threading.Event()
        server = threading.Thread(target=answer_once_each, daemon=True)
        server.start()

        async def ask_twice() -> None:
            client = HttpClient("http://{}:{}".format(*listening.getsockname()), {}, keepalive_seconds=60.0)
            await client.request("GET", "/")
            assert closed.wait(10)
            assert (await client.request("GET", "/")).content == b"hi"
            await client.close()

        asyncio.run(ask_twice())


@pytest.mark.parametrize("repeatable", [False, True])
async def test_a_connection_that_is_closed_in_place_of_an_answer_is_replaced_if_that_does_no_harm(
    repeatable: bool,
) -> None:
    async def close(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with peer(OK, close, OK, close, close) as server, client_of(server) as client:

        async def ask() -> bytes:
            async with client.stream("POST", "/", b"{}", repeatable=repeatable) as answer:
                return await answer.read()

        assert await ask() == b"hi"
        if repeatable:
            assert await ask() == b"hi"
            assert (len(server.requests), server.connections) == (3, 2)
        # Once, and not on a new connection, which no server closes for its age.
        with pytest.raises(HttpError, match="the connection broke"):
            await ask()
        assert len(server.requests) == (5 if repeatable else 2)


async def test_leaving_an_answer_early_closes_the_connection() -> None:
    async def forever(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"2\r\nhi\r\n")

    async with peer(forever) as server, client_of(server) as client:
        async with client.stream("GET", "/") as answer:
            assert await anext(answer.pieces()) == b"hi"
        await server.closed.wait()
        # Also if whoever waits is cancelled.
        server.closed.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), client.stream("GET", "/") as answer:
                await answer.read()
        await server.closed.wait()


@pytest.mark.parametrize("size", [1, http_client.MAX_BUFFERED_BYTES + 1])
async def test_an_answer_that_is_left_unread_costs_its_connection_and_not_the_next_request(size: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + bytes(size)
    async with peer(whole, OK) as server, client_of(server) as client:
        async with client.stream("GET", "/") as answer:
            # The last byte of the larger one pauses reading.
            while not answer._connection._is_complete:
                await asyncio.sleep(0)
        assert (await client.request("GET", "/")).content == b"hi"
        assert server.connections == 2


async def test_interim_answers_are_not_the_answer() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    async with peer(interim + OK) as server, client_of(server) as client:
        for _ in range(2):
            answer = await client.request("GET", "/")
            assert (answer.status_code, answer.content, answer.headers) == (200, b"hi", {"content-length": "2"})
        assert server.connections == 1


async def test_connections_of_a_burst_are_closed_when_they_are_old() -> None:
    async with peer(OK) as server:
        client = HttpClient(server.url, {}, keepalive_seconds=0.05)
        await asyncio.gather(*(client.request("GET", "/") for _ in range(4)))
        assert server.connections == 4
        async with asyncio.timeout(30):
            await server.all_closed.wait()


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (CHUNKED + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n", b"ab"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_bodies_are_read_in_every_form(answer: bytes, body: bytes) -> None:
    async def send(_head: bytes, writer: asyncio.StreamWriter) -> None:
        for at in range(len(answer)):
            writer.write(answer[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async with peer(send) as server, client_of(server) as client:
        assert (await client.request("GET", "/")).content == body


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort",
        CHUNKED + b"5\r\nhe",
        CHUNKED + b"zz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + OK,
        b"HTTP/1.1 100 Continue\r\n\r\n" * http_client.MAX_HEADER_BYTES,
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (2 * http_client.MAX_HEADER_BYTES),
    ],
)
async def test_an_answer_that_breaks_off_or_is_not_http_is_an_error(answer: bytes) -> None:
    async def send(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with peer(send) as server, client_of(server) as client:
        with pytest.raises(HttpError):
            await client.request("GET", "/")


async def test_more_than_an_answer_spoils_the_connection_and_not_the_next_answer() -> None:
    async with (
        peer(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", OK) as server,
        client_of(server) as client,
    ):
        for _ in range(2):
            answer = await client.request("GET", "/")
            assert (answer.content, answer.headers) == (b"hi", {"content-length": "2"})
        assert server.connections == 2


async def test_an_answer_that_nobody_reads_does_not_fill_the_memory() -> None:
    sent = 0

    async def flood(_head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async with peer(flood) as server, client_of(server) as client, client.stream("GET", "/") as answer:
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 64 << 20
        assert len(await anext(answer.pieces())) >= 1 << 20


async def test_what_cannot_be_sent_is_said_without_its_value() -> None:
    with pytest.raises(HttpError, match="Authorization") as refused:
        HttpClient("http://127.0.0.1", {"Authorization": "Bearer se\ncret"}, keepalive_seconds=1)
    assert "cret" not in str(refused.value)
    for url in (
        "localhost:8000",
        "ftp://x",
        "http://",
        "http://[::1",
        "http://x:port",
        "http://x:99999",
        "http://x y",
        "http://x/a b",
    ):
        with pytest.raises(ValueError, match=r".+"):
            HttpClient(url, {}, keepalive_seconds=1)
    for url in ("http://127.0.0.1:1", "http://a..b", f"http://{'a' * 64}.b"):
        client = HttpClient(url, {}, keepalive_seconds=1, connect_seconds=5)
        with pytest.raises(ConnectFailed, match="no connection"):
            await client.request("GET", "/")


async def test_an_account_in_the_url_is_sent_and_not_part_of_the_host() -> None:
    async with peer(OK) as server:
        client = HttpClient(server.url.replace("http://", "http://me:s%40cret@"), {}, keepalive_seconds=1)
        await client.request("GET", "/")
        assert b"Authorization: Basic bWU6c0BjcmV0\r\n" in server.requests[0]
        assert f"Host: {server.url[7:]}\r\n".encode() in server.requests[0]


def test_what_is_kept_of_urls_has_no_password_and_no_query() -> None:
    shown = http_client.text_without_accounts("https://ann:p,w@api/v1,http://other/v1?key=SECRET#part")
    assert shown == "https://api/v1,http://other/v1"
    assert http_client.text_without_accounts("what? #1 of a@b") == "what? #1 of a@b"


async def test_a_proxy_of_the_environment_is_used_if_it_is_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.delenv(name, raising=False)
    async with peer(OK) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url.replace("//", "//me:s%40cret@"))
        client = HttpClient("http://example.test:81/v1", {}, keepalive_seconds=1, through_proxy=True)
        for _ in range(2):
            assert (await client.request("GET", "/models")).content == b"hi"
        await client.close()
        lines = proxy.requests[0].decode().split("\r\n")
        assert lines[:2] == ["GET http://example.test:81/v1/models HTTP/1.1", "Host: example.test:81"]
        assert "Proxy-Authorization: Basic bWU6c0BjcmV0" in lines
        assert (proxy.connections, len(proxy.requests)) == (1, 2)
        client = HttpClient(proxy.url, {}, keepalive_seconds=1, through_proxy=True)
        await client.request("GET", "/")
        assert proxy.requests[2].startswith(b"GET / HTTP/1.1"), "what is for this machine stays here"
        await client.close()
        monkeypatch.setenv("NO_PROXY", "other.test, .2.1")
        client = HttpClient("http://192.0.2.1", {}, keepalive_seconds=1, connect_seconds=0.1, through_proxy=True)
        with pytest.raises(ConnectFailed):
            await client.request("GET", "/")
        assert len(proxy.requests) == 3
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ValueError, match="the proxy for it cannot be used"):
        HttpClient("http://example.test", {}, keepalive_seconds=1, through_proxy=True)


async def test_a_server_with_tls_is_reached_through_a_tunnel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=api.test"]
    files = ["-addext", "subjectAltName=DNS:api.test", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *options, *files], check=True, capture_output=True)
    identity = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    identity.load_cert_chain(certificate, key)
    trust = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(http_client, "tls_context", lambda: trust)
    served = Peer(OK)
    refused = b"HTTP/1.1 403 Forbidden\r\n\r\n"
    connected: list[bytes] = []

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(await reader.readuntil(b"\r\n\r\n"))
        if len(connected) > 1:
            writer.write(refused)
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await writer.start_tls(identity)
        await served.serve(reader, writer)

    server = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(30):
        client = HttpClient("https://api.test:444/v1", {}, keepalive_seconds=3, through_proxy=True)
        for _ in range(2):
            assert (await client.request("POST", "/x", b"{}")).content == b"hi"
        assert [request.partition(b"\r\n")[0] for request in served.requests] == [b"POST /v1/x HTTP/1.1"] * 2
        assert connected[0].startswith(b"CONNECT api.test:444 HTTP/1.1\r\nHost: api.test:444\r\n")
        await client.close()
        with pytest.raises(ConnectFailed, match=r"the proxy answers HTTP/1\.1 403 Forbidden"):
            await client.request("POST", "/x")
    server.close()


async def test_a_redirect_of_an_inference_server_is_refused_with_where_it_leads() -> None:
    moved = b"HTTP/1.1 307 Moved\r\nLocation: http://me:secret@other/v1\r\nContent-Length: 0\r\n\r\n"
    async with peer(moved) as server, asyncio.timeout(30):
        inference = InferenceServer(server.url)
        for call in (inference.get("/health"), inference.post("/load", {}), anext(inference.stream("/generate", {}))):
            with pytest.raises(RequestRefused, match=r"answered 307: it redirects to http://other/v1"):
                await call
        await inference.close()


def test_a_server_of_a_rollout_is_named_without_its_password() -> None:
    for url, key, sentence in (
        ("http://me:se/cret@h", "", "http://h is not the address of a server"),
        ("http://h", "a\nb", "The API key cannot be sent"),
    ):
        with pytest.raises(UserError, match=sentence):
            PolicyServer(url, key)


@pytest.mark.parametrize("ends", [False, True])
async def test_an_event_of_an_inference_server_has_a_bound(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_client, "MAX_EVENT_BYTES", 1 << 18)
    sent = 0

    async def stream(_head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata: {"first": 1}\n\ndata: "')
        while not ends or sent < 1 << 17:
            writer.write(b"x" * (1 << 12))
            await writer.drain()
            sent += 1 << 12
        writer.write(b'"\r\n: a comment\n\ndata: [DONE]\n\n')
        writer.close()

    async with peer(stream) as server, asyncio.timeout(30):
        events = InferenceServer(server.url).stream("/generate", {})
        assert await anext(events) == {"first": 1}
        if ends:
            assert len(await anext(events)) == sent
            assert [event async for event in events] == []
        else:
            with pytest.raises(InferenceServerGone, match="an event is longer than 262144 bytes"):
                await anext(events)
            await server.closed.wait()

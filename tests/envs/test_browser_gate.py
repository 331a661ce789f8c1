"""The only way out of a tab: what it answers, passes on and refuses, without a browser; and when a tab has loaded."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.envs.browser.chromium import BEGIN_SECONDS, DETACHED, REQUESTED, STARTED, STOPPED, LoadingState
from openclaw_rl.envs.browser.gate import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    Answerer,
    OriginGate,
    SiteReply,
    SiteRequest,
)
from support.browsing import listener

ORIGIN = "http://task.localhost"
PAGE = "Accept: text/html,*/*\r\n"


@contextlib.asynccontextmanager
async def gate_of(origin: str = ORIGIN, answer: Answerer | None = None) -> AsyncIterator[tuple[OriginGate, int]]:
    gate = OriginGate(origin, answer)
    port = int((await gate.start()).rpartition(":")[2])
    try:
        yield gate, port
    finally:
        await gate.close()


async def exchange(port: int, request: bytes) -> bytes:
    """Everything that comes back for some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        writer.write_eof()
        async with asyncio.timeout(5):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def echo(request: SiteRequest) -> SiteReply:
    return SiteReply(f"{request.verb} {request.path} {request.body.decode()}".encode())


async def test_the_tasks_origin_is_answered_by_our_function() -> None:
    async with gate_of(answer=echo) as (gate, port):
        reply = await exchange(port, b"GET http://task.localhost/a?b=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 200 ")
        assert reply.endswith(b"GET /a?b=1 ")
        posted = b"POST http://TASK.localhost:80/form HTTP/1.1\r\nContent-Length: 3\r\n\r\na=b"
        assert (await exchange(port, posted)).endswith(b"POST /form a=b")
        assert gate.refusals() == []


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET http://other.localhost/ HTTP/1.1", 204),
        ("GET http://task.localhost:81/ HTTP/1.1", 204),
        ("GET http://task.localhost.evil.example/ HTTP/1.1", 204),
        ("GET http://task.localhost@{place}/ HTTP/1.1", 204),
        ("GET http://{place}/ HTTP/1.1", 204),
        ("GET / HTTP/1.1", 204),
        ("CONNECT {place} HTTP/1.1", 403),
        ("CONNECT task.localhost:443 HTTP/1.1", 403),
        ("CONNECT task.localhost:80 HTTP/1.1", 403),
    ],
)
async def test_everything_else_is_refused_and_reaches_nothing(request_line: str, status: int) -> None:
    async with listener() as (place, received), gate_of(answer=echo) as (gate, port):
        line = request_line.format(place=place)
        reply = await exchange(port, f"{line}\r\n{PAGE}\r\n".encode())
        assert reply.startswith(f"HTTP/1.1 {status} ".encode())
        refused = gate.refusals()
        assert len(refused) <= 1
        assert gate.refusals() == []
    assert received == []


async def test_a_request_is_passed_on_to_the_origin_alone() -> None:
    async with listener() as (place, received), gate_of(f"http://{place}") as (_, port):
        head = "Host: {0}\r\nProxy-Connection: keep-alive\r\nConnection: keep-alive\r\n\r\n"
        reply = await exchange(port, f"GET http://{place}/a?b HTTP/1.1\r\n{head.format(place)}".encode())
        assert reply.endswith(b"hi")
        lines = received[0].decode().split("\r\n")
        assert lines[0] == "GET /a?b HTTP/1.1"
        assert [line for line in lines if "onnection" in line] == ["Connection: close"]
        assert (await exchange(port, f"CONNECT {place} HTTP/1.1\r\n\r\nhello".encode())).startswith(b"HTTP/1.1 200 ")
        assert received[1] == b"hello"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"GET\r\n\r\n",
        b"\xff\x00 http://task.localhost/ HTTP/1.1\r\n\r\n",
        b"GET http://task.localhost/ HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
        b"POST http://task.localhost/ HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"POST http://task.localhost/ HTTP/1.1\r\nContent-Length: 9\r\n\r\nshort",
        b"GET http://[::1/ HTTP/1.1\r\n\r\n",
    ],
)
async def test_a_broken_request_ends_its_connection_alone(request_bytes: bytes) -> None:
    async with gate_of(answer=echo) as (gate, port):
        await exchange(port, request_bytes)
        assert (await exchange(port, b"GET http://task.localhost/ HTTP/1.1\r\n\r\n")).endswith(b"GET / ")
        async with asyncio.timeout(5):
            await gate.quiet(0.01)


async def test_many_connections_at_once_are_all_answered() -> None:
    async with gate_of(answer=echo) as (_, port):
        requests = [exchange(port, f"GET http://task.localhost/{n} HTTP/1.1\r\n\r\n".encode()) for n in range(100)]
        replies = await asyncio.gather(*requests)
        assert [reply.rpartition(b"/")[2] for reply in replies] == [f"{n} ".encode() for n in range(100)]


async def test_a_closed_gate_leaves_no_connection() -> None:
    async with gate_of(answer=echo) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET http://task.localhost/ HTT")
        await writer.drain()
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def tunnels() -> AsyncIterator[tuple[OriginGate, Callable[[], Awaitable[tuple[Streams, Streams]]]]]:
    """A gate, and a function that opens a tunnel through it: the end of the browser, and the end of the origin."""
    accepted: asyncio.Queue[Streams] = asyncio.Queue()
    opened: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda *streams: accepted.put_nowait(streams), "127.0.0.1", 0)
    place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with gate_of(f"http://{place}") as (gate, port), asyncio.timeout(10):

        async def tunnel() -> tuple[Streams, Streams]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append(writer)
            writer.write(f"CONNECT {place} HTTP/1.1\r\n\r\n".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            origin = await accepted.get()
            opened.append(origin[1])
            return (reader, writer), origin

        try:
            yield gate, tunnel
        finally:
            for writer in opened:
                writer.close()
            server.close()


async def test_a_tunnel_ends_for_both_sides_when_one_of_them_ends_it() -> None:
    async with tunnels() as (_, tunnel):
        for ends_first in (0, 1):
            ends = await tunnel()
            (_, writer), (reader, _) = ends[ends_first], ends[1 - ends_first]
            writer.write(b"bye")
            writer.close()
            assert await reader.read() == b"bye"


async def test_tunnels_that_the_origin_closed_make_room_for_others() -> None:
    async with tunnels() as (_, tunnel):
        for _ in range(MAX_CONNECTIONS + 1):
            _, (_, origin_writer) = await tunnel()
            origin_writer.close()


async def test_traffic_in_a_tunnel_is_waited_for_and_an_idle_tunnel_is_not() -> None:
    async with tunnels() as (gate, tunnel):
        (reader, writer), (origin_reader, origin_writer) = await tunnel()
        for sender, receiver in [(writer, origin_reader), (origin_writer, reader)]:
            await gate.quiet(0.2)
            sent = time.monotonic()
            sender.write(b"x")
            await receiver.readexactly(1)
            await gate.quiet(0.2)
            assert time.monotonic() - sent >= 0.2


@pytest.mark.parametrize("request_line", ["CONNECT {place} HTTP/1.1", "GET http://{place}/ HTTP/1.1"])
async def test_an_origin_that_does_not_accept_is_given_up(monkeypatch: pytest.MonkeyPatch, request_line: str) -> None:
    async def never(*_: object) -> Streams:
        return await asyncio.get_running_loop().create_future()

    async with gate_of("http://task.localhost") as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        monkeypatch.setattr("openclaw_rl.envs.browser.gate.CONNECT_SECONDS", 0.01)
        monkeypatch.setattr("openclaw_rl.envs.browser.gate.asyncio.open_connection", never)
        writer.write(f"{request_line}\r\n\r\n".format(place="task.localhost:80").encode())
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (f"Content-Length: {MAX_BODY_BYTES + 1}", b"x" * 100),
        ("Transfer-Encoding: chunked", b"5\r\nhello\r\n"),
    ],
)
async def test_a_body_without_a_bound_is_not_passed_on(headers: str, body: bytes) -> None:
    async with listener() as (place, received), gate_of(f"http://{place}") as (_, port):
        head = f"POST http://{place}/form HTTP/1.1\r\nHost: {place}\r\n{headers}\r\n\r\n"
        assert await exchange(port, head.encode() + body) == b""
        assert received == []


async def test_a_body_is_passed_on_up_to_its_length() -> None:
    async with listener() as (place, received), gate_of(f"http://{place}") as (_, port):
        request = f"POST http://{place}/form HTTP/1.1\r\nContent-Length: 3\r\n\r\na=bGET /second HTTP/1.1\r\n\r\n"
        assert (await exchange(port, request.encode())).endswith(b"hi")
        assert received[0].endswith(b"\r\n\r\na=b")


@pytest.mark.parametrize(
    ("origin", "requested"),
    [
        ("http://bücher.localhost", "http://xn--bcher-kva.localhost"),
        ("http://BÜCHER.localhost:8000", "http://xn--bcher-kva.localhost:8000"),
        ("http://straße.localhost", "http://xn--strae-oqa.localhost"),
        ("http://my_host.localhost", "http://my_host.localhost"),
    ],
)
async def test_an_origin_is_compared_in_the_form_that_chromium_asks_for(origin: str, requested: str) -> None:
    async with gate_of(origin, echo) as (gate, port):
        assert (await exchange(port, f"GET {requested}/a HTTP/1.1\r\n\r\n".encode())).endswith(b"GET /a ")
        assert gate.allows(f"{requested}/a")
        assert gate.allows(f"{origin}/a")


@given(address=st.one_of(st.text(), st.text().map(lambda text: f"http://{text}")))
@settings(deadline=None)
def test_only_addresses_of_the_origin_are_allowed(address: str) -> None:
    gate = OriginGate("http://task.localhost:81")
    assert not gate.allows(address)
    assert gate.allows("http://task.localhost:81/x?y#z")
    assert not gate.allows("ftp://task.localhost:81/")


def test_a_tab_loads_from_the_request_of_a_page_to_its_end() -> None:
    state = LoadingState()
    main = {"frameId": "1"}
    for event, loads in [(REQUESTED, True), (STARTED, True), (STOPPED, False), (STARTED, True), (DETACHED, False)]:
        state.read(event, main)
        assert state.loads is loads
    state.read(REQUESTED, {**main, "disposition": "newTab"})
    assert not state.loads
    state.read(STARTED, main)
    state.read(STOPPED, {"frameId": "2"})
    assert state.loads


def test_a_page_that_was_asked_for_and_never_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("openclaw_rl.envs.browser.chromium.time.monotonic", lambda: now[0])
    state = LoadingState()
    state.read(REQUESTED, {"frameId": "1"})
    assert state.loads
    now[0] += BEGIN_SECONDS + 0.1
    assert not state.loads

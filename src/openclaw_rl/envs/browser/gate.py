"""The only way out of a tab: a proxy on loopback that knows one origin."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import idna

#: Limits of one request.
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 1024 * 1024
#: How long a connection to the origin may take to be made, one request may take, and a tunnel may stay open.
CONNECT_SECONDS = 10.0
REQUEST_SECONDS = 30.0
TUNNEL_SECONDS = 600.0
#: Connections that are served at once; others wait.
MAX_CONNECTIONS = 32
#: Refused addresses that are remembered for the model.
MAX_REFUSALS = 5
PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


@dataclass(frozen=True, slots=True)
class SiteRequest:
    """A request for a page: `path` begins with a slash and includes the query."""

    verb: str
    path: str
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class SiteReply:
    body: bytes = b""
    type: str = "text/html; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


Answerer = Callable[[SiteRequest], SiteReply]


class OriginGate:
    """A proxy for one tab, on a port of its own.

    - A request for the task's origin is answered by a function of ours or, without one, passed on to the origin.
    - Every other request is refused and reaches nothing: a page that is refused leaves the tab where it is.
    - Requests have a bounded size and time, and a bounded number is served at once.
    - A tunnel ends for both sides when one of them ends it.
    """

    def __init__(self, origin: str, answer: Answerer | None = None) -> None:
        self.origin = origin
        self._place = place_of(origin)
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._busy = 0
        self._last = 0.0
        self._refused: list[str] = []

    async def start(self) -> str:
        """The address of the proxy."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=MAX_HEAD_BYTES)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def allows(self, address: str) -> bool:
        """Whether an address belongs to the task."""
        return place_of(address) == self._place and address.startswith(("http://", "https://"))

    def refusals(self) -> list[str]:
        """The addresses that were refused since the last call."""
        refused = self._refused
        self._refused = []
        return refused

    async def quiet(self, seconds: float) -> None:
        """Wait until no request has been under way, and nothing has gone through a tunnel, for so many seconds."""
        while self._busy or time.monotonic() - self._last < seconds:
            await asyncio.sleep(seconds / 2)

    def refuse(self, address: str) -> None:
        """Remember an address that the tab may not go to."""
        if len(self._refused) < MAX_REFUSALS and address not in self._refused:
            self._refused.append(address)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._slots:
                await self._serve(reader, writer)
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError, TimeoutError):
            pass  # a broken or slow connection concerns nobody but the browser
        except asyncio.CancelledError:
            pass  # the gate is being closed
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(REQUEST_SECONDS):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *headers = head.rstrip("\r\n").split("\r\n")
        verb, target, _ = line.split(" ", 2)
        tunnel = verb == "CONNECT"
        # A tunnel is asked for by host and port alone. Everything in it goes to them.
        allowed = place_of(f"https://{target}" if tunnel else target) == self._place
        if not allowed:
            # The model is told of pages alone: browsers make many other requests on their own.
            if any(header.lower().startswith("accept: text/html") for header in headers):
                self.refuse(target)
            await self._refuse(writer, tunnel=tunnel)
        elif tunnel:
            await self._tunnel(reader, writer)
        else:
            await self._exchange(reader, writer, verb, target, headers)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, verb: str, target: str, headers: list[str]
    ) -> None:
        self._busy += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                parts = urlsplit(target)
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                body = await read_body(reader, headers)
                if self._answer is None:
                    await self._pass_on(writer, f"{verb} {path} HTTP/1.1", headers, body)
                    return
                reply = self._answer(SiteRequest(verb, path, body))
                writer.write(written(reply, with_body=verb != "HEAD"))
                await writer.drain()
        finally:
            self._busy -= 1
            self._last = time.monotonic()

    async def _refuse(self, writer: asyncio.StreamWriter, *, tunnel: bool) -> None:
        """No content: a tab that was to show it stays where it is."""
        writer.write(written(SiteReply(status=403 if tunnel else 204)))
        await writer.drain()

    async def _pass_on(self, writer: asyncio.StreamWriter, line: str, headers: list[str], body: bytes) -> None:
        """Send a request to the origin, one for each connection, and its answer back."""
        kept = [header for header in headers if header_name(header) not in ("proxy-connection", "connection")]
        origin_reader, origin_writer = await self._connect()
        try:
            origin_writer.write("\r\n".join([line, *kept, "Connection: close", "", ""]).encode("latin-1") + body)
            await self._copy(origin_reader, writer)
        finally:
            origin_writer.close()

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._answer is not None:
            await self._refuse(writer, tunnel=True)
            return
        origin_reader, origin_writer = await self._connect()
        try:
            writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            both = [
                asyncio.create_task(self._copy(reader, origin_writer)),
                asyncio.create_task(self._copy(origin_reader, writer)),
            ]
            try:
                await asyncio.wait(both, timeout=TUNNEL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in both:
                    direction.cancel()
                await asyncio.gather(*both, return_exceptions=True)
        finally:
            origin_writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(*self._place)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while part := await reader.read(65536):
            self._last = time.monotonic()
            writer.write(part)
            await writer.drain()


def place_of(address: str) -> tuple[str, int]:
    """Host and port of an address, in the form that Chromium asks for; an empty host if it has none."""
    try:
        parts = urlsplit(address)
        host = (parts.hostname or "").lower()
        # Chromium encodes a name that is not ASCII, such as bücher.de.
        host = host if host.isascii() else idna.encode(host, uts46=True).decode()
        return host, parts.port or PORTS.get(parts.scheme, 0)
    except ValueError:
        return "", 0


def header_name(header: str) -> str:
    return header.partition(":")[0].strip().lower()


async def read_body(reader: asyncio.StreamReader, headers: list[str]) -> bytes:
    """The body of a request. Raises ValueError if it is too large, or does not say how large it is."""
    if any(header_name(header) == "transfer-encoding" for header in headers):
        raise ValueError("the body of a request has no length")
    lengths = [header.partition(":")[2].strip() for header in headers if header_name(header) == "content-length"]
    length = int(lengths[0]) if lengths and lengths[0].isdecimal() else 0
    if length > MAX_BODY_BYTES:
        raise ValueError("the body of a request is too large")
    return await reader.readexactly(length)


def written(reply: SiteReply, *, with_body: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {reply.status} Reply", f"Content-Type: {reply.type}", "Connection: close"]
    lines += [] if reply.status == 204 else [f"Content-Length: {len(reply.body)}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + (reply.body if with_body else b"")

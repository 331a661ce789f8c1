"""An HTTP/1.1 client for servers that are asked often. A request takes a fifth of the time that httpx needs for it."""

import asyncio
import base64
import contextlib
import json
import re
import select
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from functools import cache, lru_cache
from ipaddress import ip_address
from typing import Any, cast
from urllib.parse import SplitResult, unquote, urlsplit

import httptools

#: Bytes of an answer that are read ahead of whoever reads them.
MAX_BUFFERED_BYTES = 1 << 20
#: Bytes of an answer's headers, together with all interim answers (1xx) before it.
MAX_HEADER_BYTES = 1 << 16
SWITCHING_PROTOCOLS = 101
#: A server has few names, and few pages use it.
MAX_KNOWN_ADDRESSES = 64


class HttpError(Exception):
    """The connection broke, or the answer is not HTTP."""


class ConnectFailed(HttpError):
    """No connection could be made: the server has not seen the request."""


class HttpResponse:
    """An answer. Its body is read with `pieces` or `read`."""

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = connection
        self.status_code, self.headers = connection.status, connection.headers
        self.content = b""
        """The body, after `read`."""
        self.is_cut = False
        """Whether `read` ended before the body did."""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status_code < 300

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._connection.next_piece():
            yield piece

    async def read(self, max_bytes: int | None = None) -> bytes:
        """The body; of one that is larger than `max_bytes`, its beginning."""
        found, size = list[bytes](), 0
        async for piece in self.pieces():
            found.append(piece)
            size += len(piece)
            if max_bytes is not None and size > max_bytes:
                self.is_cut = True
                break
        self.content = b"".join(found)[:max_bytes]
        return self.content

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return json.loads(self.content)


class HttpConnection(asyncio.Protocol):
    """One connection: a request at a time, and its answer as it arrives."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._changed = asyncio.Event()
        self._error: HttpError | None = None
        self._clear()

    def _clear(self) -> None:
        self.status, self.headers = 0, dict[str, str]()
        self._pieces: list[bytes] = []
        self._buffered = self._header_bytes = 0
        self._is_interim = self._has_headers = self._is_complete = self._keeps_alive = self._is_paused = False
        self.is_answered = False
        """Whether anything has arrived since the last request."""

    @property
    def is_silent(self) -> bool:
        """Whether nothing has arrived that the event loop has not read yet, such as the end of the connection."""
        assert self._transport is not None
        looked_at = select.poll()
        looked_at.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not looked_at.poll(0)

    @property
    def is_reusable(self) -> bool:
        """Whether another request can be sent: the answer ended and was read to its end."""
        is_read = self._is_complete and not self._pieces and not self._is_paused
        return is_read and self._keeps_alive and self._error is None

    async def send(self, request: bytes) -> HttpResponse:
        """Send a request; return when the answer's headers are there. Raises HttpError."""
        assert self._transport is not None
        self._clear()
        self._transport.write(request)
        while not self._has_headers:
            await self._change()
        return HttpResponse(self)

    async def next_piece(self) -> bytes:
        """What has arrived of the body; empty at its end. Raises HttpError."""
        while not self._pieces and not self._is_complete:
            await self._change()
        piece, self._pieces, self._buffered = b"".join(self._pieces), [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return piece

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    def _fail(self, reason: str) -> None:
        self._error = self._error or HttpError(reason)
        self._changed.set()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of this class, but are not of it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.is_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
        self._header_bytes += 0 if self._has_headers else len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            self._fail("the answer's headers are too long")
        if self._error is not None:
            self.close()
        elif self._buffered > MAX_BUFFERED_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        ends_body = not {"content-length", "transfer-encoding"} & self.headers.keys()
        if self._has_headers and error is None and ends_body:
            self._is_complete = True
        self._fail(f"the connection broke{f': {error}' if error else ''}")

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise HttpError("the server sent more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._is_interim = 100 <= self.status < 200
        if self.status == SWITCHING_PROTOCOLS:
            self._fail("the server switches to another protocol")
        elif self._is_interim:
            self.headers = {}
        else:
            self._has_headers = True

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._buffered += len(piece)

    def on_message_complete(self) -> None:
        if not self._is_interim:
            self._is_complete, self._keeps_alive = True, bool(self._parser.should_keep_alive())


class HttpClient:
    """Requests to one server. Calls raise HttpError.

    * A connection is used for one request at a time and kept for the next one, `keepalive_seconds` at most.
    * Leaving a response before its end closes its connection, by which the server knows that nobody waits.
    * Interim answers (1xx) are skipped.
    * There is no limit for the time of an answer, no redirect and no compression.
    * A proxy is used only if `through_proxy`: the one that the environment names for the server; never to this machine.
    * An answer that nobody reads does not fill the memory.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        keepalive_seconds: float,
        connect_seconds: float | None = None,
        through_proxy: bool = False,
    ) -> None:
        """Raises ValueError for a URL that is not one, and HttpError for a header that cannot be sent."""
        parts = split_url(url)
        self._host = parts.hostname or ""
        self._ssl = tls_context() if parts.scheme == "https" else None
        self._port = port_of(parts)
        self._path = parts.path.rstrip("/")
        self._proxy = proxy_of(parts) if through_proxy else None
        fixed = {
            "Host": parts.netloc.rpartition("@")[2],
            "Accept": "*/*",
            "Content-Type": "application/json",
            **headers,
        }
        if account := account_of(parts):
            fixed.setdefault("Authorization", account)
        if self._proxy is not None and self._ssl is None:
            # Such a proxy reads the request: its first line has the whole address.
            self._path = f"http://{fixed['Host']}{self._path}"
            if account := account_of(self._proxy):
                fixed["Proxy-Authorization"] = account
        self._headers = header_lines(fixed)
        self._keepalive_seconds, self._connect_seconds = keepalive_seconds, connect_seconds
        self._idle = deque[HttpConnection]()
        """The one that was used last is at the end."""
        self._closing: asyncio.TimerHandle | None = None

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> HttpResponse:
        """An answer with its whole body."""
        async with self.stream(method, path, body, headers) as response:
            await response.read()
            return response

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        repeatable: bool = False,
    ) -> AsyncIterator[HttpResponse]:
        """An answer whose body is read as it arrives.

        A `repeatable` request is sent again, once, if a kept connection ends before any answer: most likely the server
        was closing it just then.
        """
        lines = header_lines(headers or {})
        head = f"{method} {self._path}{path} HTTP/1.1\r\n".encode() + self._headers + lines
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        connection = await self._connect()
        try:
            try:
                response = await connection.send(request)
            except HttpError:
                if not repeatable or connection.is_answered or not connection.idle_since:
                    raise
                connection.close()
                connection = await self._open()
                response = await connection.send(request)
            yield response
        finally:
            if connection.is_reusable:
                connection.idle_since = asyncio.get_running_loop().time()
                self._idle.append(connection)
                if self._closing is None:
                    self._close_later()
            else:
                connection.close()

    async def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        while self._idle:
            self._idle.pop().close()

    def _close_later(self) -> None:
        """Close the connection that has been idle longest when its time is up."""
        end = self._idle[0].idle_since + self._keepalive_seconds
        self._closing = asyncio.get_running_loop().call_at(end, self._close_old)

    def _close_old(self) -> None:
        self._closing = None
        oldest = asyncio.get_running_loop().time() - self._keepalive_seconds
        while self._idle and self._idle[0].idle_since <= oldest:
            self._idle.popleft().close()
        if self._idle:
            self._close_later()

    async def _connect(self) -> HttpConnection:
        """A kept connection, or a new one."""
        oldest = asyncio.get_running_loop().time() - self._keepalive_seconds
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.idle_since > oldest and connection.is_silent:
                return connection
            connection.close()
        return await self._open()

    async def _open(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                if self._proxy is not None:
                    return await self._connect_through(self._proxy)
                _, connection = await loop.create_connection(HttpConnection, self._host, self._port, ssl=self._ssl)
        # UnicodeError: a host whose name has no form in which it can be looked up.
        except (OSError, TimeoutError, UnicodeError) as error:
            raise ConnectFailed(f"no connection: {error or 'it takes too long'}") from error
        return connection

    async def _connect_through(self, proxy: SplitResult) -> HttpConnection:
        """A connection by way of a proxy. To a server with TLS, the proxy makes a tunnel into which it cannot look."""
        loop = asyncio.get_running_loop()
        tls = tls_context() if proxy.scheme == "https" else None
        host, port = proxy.hostname or "", port_of(proxy)
        if self._ssl is None:
            _, connection = await loop.create_connection(HttpConnection, host, port, ssl=tls)
            return connection
        transport, tunnel = await loop.create_connection(Tunnel, host, port, ssl=tls)
        try:
            await tunnel.open(f"{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}", proxy)
            connection = HttpConnection()
            secured = await loop.start_tls(transport, connection, self._ssl, server_hostname=self._host)
            assert secured is not None
            connection.connection_made(secured)
        except BaseException:
            transport.abort()
            raise
        return connection


class Tunnel(asyncio.Protocol):
    """Asks a proxy for a connection to a server. What is sent afterwards goes to the server."""

    def __init__(self) -> None:
        self._answer = b""
        self._answered = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    async def open(self, server: str, proxy: SplitResult) -> None:
        """Raises ConnectFailed if the proxy refuses."""
        assert self._transport is not None
        account = account_of(proxy)
        lines = header_lines({"Host": server, **({"Proxy-Authorization": account} if account else {})})
        self._transport.write(f"CONNECT {server} HTTP/1.1\r\n".encode() + lines + b"\r\n")
        await self._answered
        first = self._answer.partition(b"\r\n")[0].decode(errors="replace")
        if first.split()[1:2] != ["200"]:
            raise ConnectFailed(f"the proxy answers {first or 'nothing'}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if b"\r\n\r\n" in self._answer or len(self._answer) > MAX_HEADER_BYTES:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)


def port_of(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


@lru_cache(maxsize=MAX_KNOWN_ADDRESSES)
def is_loopback(url: str) -> bool:
    """Whether an address is a loopback address or `localhost`, which always mean this machine."""
    try:
        name = urlsplit(url).hostname
        return name == "localhost" or ip_address(name or "").is_loopback
    except ValueError:
        return False


def account_of(parts: SplitResult) -> str:
    """The header value for the name and the password in a URL; empty if there are none."""
    if parts.username is None:
        return ""
    account = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(account.encode()).decode()}"


def proxy_of(parts: SplitResult) -> SplitResult | None:
    """The proxy that the environment names for a server. Raises ValueError for one that is not an HTTP proxy."""
    from urllib.request import getproxies_environment, proxy_bypass

    if is_loopback(parts.geturl()):
        # What is for this machine leaves it for no proxy, also where the environment forgets to say so.
        return None
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    try:
        return split_url(proxy if "://" in proxy else f"http://{proxy}")
    except ValueError as error:
        raise ValueError(f"the proxy for it cannot be used: {error}") from None


@cache
def tls_context() -> ssl.SSLContext:
    """Trusts the authorities of this machine and those that httpx brings along: some machines have none."""
    import certifi

    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they are sent. Raises HttpError for one that cannot be sent; the error does not show its value."""
    for name, value in headers.items():
        if not value.isprintable():
            raise HttpError(f"the header {name} holds a character that cannot be sent")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


def split_url(url: str) -> SplitResult:
    """The parts of a server's URL. Raises ValueError, which does not repeat any part: one may be a password."""
    if not url.isprintable() or " " in url:
        raise ValueError("it holds a space or another character that a URL cannot hold")
    try:
        parts = urlsplit(url)
        is_valid = parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError("its host or its port is not valid")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("it must begin with http:// or https:// and a host")
    if parts.query or parts.fragment:
        raise ValueError("what stands after ? or # would not be sent; leave it out")
    return parts


def url_without_account(url: str) -> str:
    """A URL for messages and logs: without a user's name and password, and without a query, which may hold a key."""
    try:
        parts = split_url(url)
    except ValueError:
        # Where it is not known which part is the password, everything before the last @ goes.
        scheme, slashes, _ = url.rpartition("@")[0].partition("//")
        shown = f"{scheme}{slashes}{url.rpartition('@')[2]}" if slashes else url.rpartition("@")[2]
        return re.split("[?#]", shown)[0]
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def text_without_accounts(text: str) -> str:
    """An option's value or a word of a command. Its URLs, separated by commas, are without passwords and queries."""
    if "://" not in text:
        return text
    # A password may contain a comma.
    return ",".join(map(url_without_account, re.split(r",(?=\s*[a-z]+://)", text)))

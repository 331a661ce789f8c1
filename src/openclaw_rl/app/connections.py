"""The server's side of HTTP connections: how many there may be, and how long a request may take to arrive."""

import asyncio
import logging
import resource
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.options import ServerOptions

log = logging.getLogger(__name__)

#: Files that the process needs for other things than connections: the ledger, pipes to workers, logs, checkpoints.
FILES_NOT_FOR_CONNECTIONS = 200
#: The most bytes in the head of a request: its first line and its headers.
MAX_HEAD_BYTES = 64 << 10
#: How often the log says that connections are refused.
LOG_INTERVAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds for connections and for requests that arrive slowly. Responses may take as long as they need."""

    total: int
    per_address: int
    head_seconds: float
    body_seconds: float


def connection_limits(options: ServerOptions) -> ConnectionLimits:
    """The limits that the options set. There are no more connections than the process may open files for."""
    files, _hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    total = options.max_connections
    if files != resource.RLIM_INFINITY:
        total = min(total, files - min(FILES_NOT_FOR_CONNECTIONS, files // 2))
    return ConnectionLimits(total, options.max_connections_per_address, options.header_seconds, options.body_seconds)


def connection_type(limits: ConnectionLimits) -> Any:
    """What uvicorn calls to make the protocol of a new connection."""
    return partial(ClientConnection, Connections(limits))


class Connections:
    """The open connections of one server.

    - There are never more than the limits allow, in all and for each address.
    - A new connection takes the place of the one that has waited longest for its client to send a request. So clients
      that connect and send nothing, or send it very slowly, shut nobody out.
    - If all connections are busy with requests, a new one is refused with 503.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: Counter[str] = Counter()
        self._waiting: dict[ClientConnection, None] = {}
        self._last_logged = -LOG_INTERVAL_SECONDS

    def admit(self, connection: "ClientConnection") -> bool:
        """Whether the connection may stay. If so, it counts until `remove`."""
        limits = self.limits
        address = connection.address
        if self._open[address] >= limits.per_address and not self._evict(address):
            return self._refuse(f"{address} has {limits.per_address} connections (--max-connections-per-address)")
        if self._open.total() >= limits.total and not self._evict(None):
            return self._refuse(f"there are {limits.total} connections (--max-connections, or the limit of open files)")
        self._open[address] += 1
        return True

    def remove(self, connection: "ClientConnection") -> None:
        """The connection has been closed."""
        self._waiting.pop(connection, None)
        self._open[connection.address] -= 1
        if not self._open[connection.address]:
            del self._open[connection.address]

    def waits(self, connection: "ClientConnection") -> None:
        """The client has to send a request next."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def busy(self, connection: "ClientConnection") -> None:
        """A request has arrived, and is being answered."""
        self._waiting.pop(connection, None)

    def _evict(self, address: str | None) -> bool:
        oldest = next((c for c in self._waiting if address in (None, c.address)), None)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    def _refuse(self, reason: str) -> bool:
        now = time.monotonic()
        if now - self._last_logged >= LOG_INTERVAL_SECONDS:
            self._last_logged = now
            log.warning("New connections are refused: %s, all busy.", reason)
        return False


class ClientConnection(HttpToolsProtocol):
    """One connection.

    - A client that takes too long to send a request gets 408, and the connection is closed.
    - What is not HTTP is answered with an error in OpenAI's shape.
    """

    def __init__(self, connections: Connections, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.address = ""
        self._connections = connections
        self._counted = False
        self._in_head = True
        self._head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._connections.admit(self):
            message = "The server has too many connections at the moment; try again later."
            self._answer(ApiError(503, message, code="too_many_connections", headers={"Retry-After": "1"}))
            return
        self._counted = True
        self._connections.waits(self)
        self._expect("headers", self._connections.limits.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection at once, and give its place to another."""
        self._stop_clock()
        if self._counted:
            self._counted = False
            self._connections.remove(self)
        if not self.transport.is_closing():
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._answer(
                ApiError(431, f"The headers are larger than {MAX_HEAD_BYTES >> 10} KiB.", code="head_too_large")
            )

    def on_message_begin(self) -> None:
        self._expect("headers", self._connections.limits.head_seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._expect("body", self._connections.limits.body_seconds)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._stop_clock()
        self._connections.busy(self)
        super().on_message_complete()
        if self.cycle.response_complete:
            # The answer did not wait for the end of the body, so no other event will say that the client is next.
            self._wait_for_request()

    def on_response_complete(self) -> None:
        if self._in_head and not self.pipeline:
            self._wait_for_request()
        super().on_response_complete()

    def _wait_for_request(self) -> None:
        if self._counted:
            self._connections.waits(self)
            self._expect("headers", self.timeout_keep_alive + self._connections.limits.head_seconds)

    def send_400_response(self, msg: str) -> None:
        self._answer(ApiError(400, msg, code="invalid_http"))

    def _expect(self, part: str, seconds: float) -> None:
        """Give the client so many seconds for a part of its request."""
        self._stop_clock()
        self._deadline = self.loop.call_later(seconds, self._too_slow, part, seconds)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self, part: str, seconds: float) -> None:
        answers_earlier_request = bool(self.pipeline) or (
            part == "headers" and self.cycle is not None and not self.cycle.response_complete
        )
        if answers_earlier_request:
            # The server itself does not read the next request before it has answered this one.
            self._expect(part, seconds)
            return
        self._answer(ApiError(408, f"The request's {part} did not arrive within {seconds:g} seconds.", code="too_slow"))

    def _answer(self, error: ApiError) -> None:
        """Send an error that no route sees, unless this request's answer has begun, and close the connection."""
        self._stop_clock()
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and self._in_head):
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            lines = [name + b": " + value + b"\r\n" for name, value in headers]
            self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()

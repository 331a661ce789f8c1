"""An HTTP/1.1 client that sends any bytes and reads the answer, for requests that no library would send."""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

#: The longest header that is read.
MAX_HEAD_BYTES = 1 << 20


class NoAnswer(Exception):
    """The server closed the connection without an answer."""


@dataclass(frozen=True)
class RawAnswer:
    """An HTTP response. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """A request as it is sent. The headers must say how long the body is."""
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + body


class RawConnection:
    """One connection, opened when it is needed and kept while the server keeps it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, request: bytes, *, without_body: bool = False) -> RawAnswer:
        """Send a request and read its answer. `without_body`: of HEAD. Raises NoAnswer."""
        kept = self._streams is not None
        try:
            return await self._exchange(request, without_body)
        except NoAnswer:
            if not kept:
                raise
        # The server may have closed a kept connection just before the request came.
        return await self._exchange(request, without_body)

    async def _exchange(self, request: bytes, without_body: bool) -> RawAnswer:
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self.port, limit=MAX_HEAD_BYTES)
            reader, writer = self._streams
            with contextlib.suppress(OSError):  # the server may answer before it has read everything, and close
                writer.write(request)
                await writer.drain()
            answer = await read_answer(reader, without_body)
        except (OSError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise NoAnswer(repr(error)) from error
        except BaseException:
            await self.close()
            raise
        if answer.headers.get("connection", "").lower() == "close":
            await self.close()
        return answer

    async def close(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.transport.abort()


async def read_answer(reader: asyncio.StreamReader, without_body: bool) -> RawAnswer:
    """The next response that is final. Raises IncompleteReadError and OSError."""
    status = 100
    while status < 200:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")[:-2]
        status = int(first.split(" ", 2)[1])
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if without_body or status in (204, 304):
        return RawAnswer(status, headers, b"")
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return RawAnswer(status, headers, await read_chunks(reader))
    if "content-length" in headers:
        return RawAnswer(status, headers, await reader.readexactly(int(headers["content-length"])))
    return RawAnswer(status, headers, await reader.read())


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(parts)

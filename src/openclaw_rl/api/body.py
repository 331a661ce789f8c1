"""Reads request bodies: how large they may be, one by one and together."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from openclaw_rl.api.errors import ApiError

#: The largest body of a request that is not a chat, in bytes.
MAX_SMALL_BODY_BYTES = 1_000_000
#: How many bodies of the largest size may be held at once.
MAX_LARGE_BODIES = 8
#: The most values in a body, the keys of objects not counted. Parsing a value holds up all other requests, for a few
#: microseconds each; an agent's request with thousands of messages has a quarter of this.
MAX_VALUES = 50_000
QUOTE, BACKSLASH = b'"', ord("\\")


class BodyReader:
    """Reads the bodies of a server's requests.

    - A body is refused as soon as it is too large. Its length header is not trusted.
    - All bodies that have not been parsed yet have a bounded size together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request, max_bytes: int = MAX_SMALL_BODY_BYTES) -> AsyncIterator[bytes]:
        """The request's body, which counts as held until the block ends. Raises 413, and 429 if too much is held."""
        max_bytes = min(max_bytes, self.max_bytes)
        size = 0
        parts: list[bytes] = []
        try:
            async for part in request.stream():
                size += len(part)
                self._held += len(part)
                self._check(size, max_bytes)
                parts.append(part)
            body = b"".join(parts)
            parts.clear()
            yield body
        except ClientDisconnect:
            raise ApiError(400, "The client disconnected before it had sent the whole request.") from None
        finally:
            self._held -= size

    def _check(self, size: int, max_bytes: int) -> None:
        if size > max_bytes:
            hint = " (--max-request-mb)" if max_bytes == self.max_bytes else ""
            raise ApiError(413, f"The request is larger than {max_bytes / 1e6:g} MB{hint}.")
        if self._held > MAX_LARGE_BODIES * self.max_bytes:
            message = "The server is reading too many large requests at the moment; try again later."
            raise ApiError(429, message, code="too_many_large_requests", headers={"Retry-After": "1"})


def count_values(body: bytes) -> int:
    """How many values a JSON text has; beyond MAX_VALUES, at least how many."""
    if separators(body) <= MAX_VALUES:
        return separators(body)
    # Many of them may be in strings. Short steps, so that other threads can go on.
    count, start = 0, 0
    while start < len(body) and count <= MAX_VALUES:
        opening = body.find(QUOTE, start)
        count += separators(body[start : opening if opening >= 0 else len(body)])
        if opening < 0:
            break
        start = end_of_string(body, opening + 1)
    return count


def separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def end_of_string(body: bytes, start: int) -> int:
    """Where a string ends whose opening quote is before `start`."""
    while (closing := body.find(QUOTE, start)) >= 0:
        first = closing
        while first > start and body[first - 1] == BACKSLASH:
            first -= 1
        start = closing + 1
        if (closing - first) % 2 == 0:
            return start
    return len(body)

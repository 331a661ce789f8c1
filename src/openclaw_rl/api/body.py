"""Reads request bodies: how large they may be, one by one and together."""

from fastapi import Request

from openclaw_rl.api.errors import ApiError

#: The largest body of a request that is not a chat, in bytes.
MAX_SMALL_BODY_BYTES = 1_000_000
#: How many bodies of the largest size may be held at once.
MAX_LARGE_BODIES = 8
#: The most values in a body, the keys of objects not counted. Parsing a value holds up all other requests, for a few
#: microseconds each; an agent's request with thousands of messages has a quarter of this.
MAX_VALUES = 50_000
QUOTE, BACKSLASH = b'"', ord("\\")
#: Before each value of an object or a list stands one of these.
SEPARATORS = b",[{"


class BodyReader:
    """Reads the bodies of a server's requests.

    - A body is refused as soon as it is too large. Its length header is not trusted.
    - All bodies that have not been parsed yet have a bounded size together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = 0

    def read(self, request: Request, max_bytes: int = MAX_SMALL_BODY_BYTES) -> "BodyOf":
        """The request's body, which counts as held until the block ends. Raises 413, and 429 if too much is held."""
        return BodyOf(self, request, min(max_bytes, self.max_bytes))

    def hold(self, size: int) -> None:
        """Count bytes as held; as no longer held if `size` is negative."""
        self._held += size

    def check(self, size: int, max_bytes: int) -> None:
        """Raise ApiError if a body of which so much has arrived is too large, or if too much is held."""
        if size > max_bytes:
            hint = " (--max-request-mb)" if max_bytes == self.max_bytes else ""
            raise ApiError(413, f"The request is larger than {max_bytes / 1e6:g} MB{hint}.")
        if self._held > MAX_LARGE_BODIES * self.max_bytes:
            message = "The server is reading too many large requests at the moment; try again later."
            raise ApiError(429, message, code="too_many_large_requests", headers={"Retry-After": "1"})


class BodyOf:
    """The body of one request, as a block during which it is held."""

    def __init__(self, reader: BodyReader, request: Request, max_bytes: int) -> None:
        self._reader, self._request, self._max_bytes = reader, request, max_bytes
        self._size = 0

    async def __aenter__(self) -> bytes:
        parts: list[bytes] = []
        try:
            more = True
            while more:
                message = await self._request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "The client disconnected before it had sent the whole request.")
                part, more = message.get("body", b""), message.get("more_body", False)
                self._size += len(part)
                self._reader.hold(len(part))
                self._reader.check(self._size, self._max_bytes)
                parts.append(part)
        except BaseException:
            self._reader.hold(-self._size)
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def __aexit__(self, *_: object) -> None:
        self._reader.hold(-self._size)


def most_values(text: bytes | str) -> int:
    """At least as many values as a JSON text of this length can have: each takes two characters."""
    return len(text) // 2 + 1


def count_values(body: bytes) -> int:
    """How many values a JSON text has; beyond MAX_VALUES, at least how many."""
    at_most = separators(body)
    if at_most <= MAX_VALUES:
        return at_most
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
    # One pass, where a count of each would take three.
    return len(text) - len(text.translate(None, SEPARATORS))


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

"""Who may use the server: API keys, and who may operate it; without keys, only programs on this machine."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from hmac import compare_digest
from ipaddress import ip_address, ip_network

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.options import ApiKey
from openclaw_rl.http_client import is_loopback

#: The owner of all requests to a server without keys.
ANYONE = "anyone"
#: In the scope of a request with a wrong key.
WRONG_KEY = "openclaw_rl.wrong_key"
#: How many wrong keys an address may try at once, and how often after that.
FREE_TRIES, TRY_SECONDS = 10, 0.5
#: The longest delay of an answer.
MAX_WAIT_SECONDS = 5.0
#: The most answers that wait, and the most sources that are remembered. An answer that waits keeps its connection, and
#: behind a proxy all connections come from one address: most of --max-connections-per-address is left to others.
MAX_WAITING, MAX_SOURCES = 100, 1000
#: These change nothing, and a browser does not show their answers to a page of another site.
READING_METHODS = ("GET", "HEAD")
HOW_TO_SET_A_KEY = "start the server with a key (SGLANG_API_KEY or --api-key)"


class KeyCheck:
    """Checks the keys that requests carry, as a bearer token or, as Anthropic's clients do, in `X-Api-Key`.

    - A server without keys is for everyone who reaches it, operations included.
    - Only the first key may operate the server, which affects all users.
    - A key is compared with every known key in constant time, so that timing reveals nothing.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(key.name, key.secret.encode()) for key in keys]

    def owner(self, request: Request) -> str:
        """The name of the key that the request carries; raises 401 if it carries no known key."""
        owner = self.known_owner(request)
        if owner is None:
            problem = (
                "The API key is not valid."
                if sent_key(request)
                else "Send an API key as a bearer token or in X-Api-Key."
            )
            raise ApiError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return owner

    def known_owner(self, request: Request) -> str | None:
        """The name of the key that the request carries; None if it carries no known key."""
        return self.owner_of(sent_key(request), request.scope) if self._keys else ANYONE

    @property
    def are_set(self) -> bool:
        """Whether the server has keys."""
        return bool(self._keys)

    def owner_of(self, sent: bytes, scope: Scope) -> str | None:
        """The name of a key that came with a request; None if no key is like this one: `SlowGuesses` is told."""
        matches = [name for name, secret in self._keys if compare_digest(secret, sent)]
        if sent and not matches:
            scope[WRONG_KEY] = True
        return matches[0] if matches else None

    def may_operate(self, owner: str) -> bool:
        """Whether this owner may operate the server."""
        return not self._keys or owner == self._keys[0][0]

    def check_operator(self, request: Request) -> None:
        """Raises 401 for a request without a known key, 403 for one whose key may not operate the server."""
        if not self.may_operate(self.owner(request)):
            raise ApiError(
                403,
                "This key may not operate the server: use the admin key (--admin-key, else the first of --api-key).",
                code="operator_only",
            )


def sent_key(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return (key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).strip().encode()


class SlowGuesses:
    """Delays the answers to wrong keys, so that nobody can try many. For a server with keys.

    - A right key is never delayed, whatever others send, also from the same address.
    - An address may try `FREE_TRIES` wrong keys at once. After that, each has to wait for the one before it.
    - An answer waits at most `MAX_WAIT_SECONDS`. Addresses that are remembered, and answers that wait, are bounded:
      further ones are not delayed.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._next_answer: dict[str, float] = {}
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_slowly(message: Message) -> None:
            if message["type"] == "http.response.start" and WRONG_KEY in scope:
                await self._wait(source_of(scope))
            await send(message)

        await self.app(scope, receive, send_slowly)

    async def _wait(self, source: str) -> None:
        now = time.monotonic()
        last = max(self._next_answer.pop(source, 0.0), now - FREE_TRIES * TRY_SECONDS)
        answer_at = min(last + TRY_SECONDS, now + MAX_WAIT_SECONDS)
        self._next_answer[source] = answer_at
        if len(self._next_answer) > MAX_SOURCES:
            del self._next_answer[next(iter(self._next_answer))]
        if answer_at <= now or self._waiting >= MAX_WAITING:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(answer_at - now)
        finally:
            self._waiting -= 1


def source_of(scope: Scope) -> str:
    """Where a request comes from; empty if a proxy names no address. One client can have a whole IPv6 network."""
    try:
        address = ip_address((scope.get("client") or ("",))[0].partition("%")[0])
    except ValueError:
        return ""
    return str(address) if address.version == 4 else str(ip_network(f"{address}/64", strict=False))


class LoopbackOnly:
    """Refuses requests that do not come from this machine, before any route sees them. For a server without keys.

    Any web page can make the browser that shows it send requests to this machine. Two headers, which a page cannot
    choose, reveal such requests. `Origin` says which site the page is from. `Host` is the name under which the server
    was reached; it is a foreign name if somebody has pointed their domain at this machine (DNS rebinding).

    Pages from `origins`, which the owner has named, count as pages of this machine.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self.app = app
        self.origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The first of each name counts. Starlette's headers would search all of them for each.
        headers = dict(reversed(scope["headers"])) if scope["type"] == "http" else {}
        refused = refusal(scope["method"], headers, self.origins) if scope["type"] == "http" else None
        await (refused.response(scope) if refused else self.app)(scope, receive, send)


def refusal(method: str, headers: Mapping[bytes, bytes], origins: Sequence[str]) -> ApiError | None:
    """The error for a request that is refused without a key; None if the request is allowed."""
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
    if not is_loopback(f"//{host}"):
        problem = f"Without an API key this server answers only to names of this machine, and {host!r} is not one"
        return ApiError(403, f"{problem}: use 127.0.0.1 or localhost, or {HOW_TO_SET_A_KEY}.", code="foreign_host")
    is_trusted = origin is None or origin in origins or is_loopback(origin)
    if not is_trusted and method not in READING_METHODS:
        problem = f"Without an API key this server serves only pages on this machine, not from {origin!r}"
        return ApiError(
            403, f"{problem}: {HOW_TO_SET_A_KEY}, or name the origin (--allow-origin).", code="foreign_origin"
        )
    return None

"""Without an API key, only programs on this machine may use the server; web pages from elsewhere may not.

Any web page can make the browser that shows it send requests to this machine. Two headers, which a page cannot choose,
reveal such requests. `Origin` says which site the page is from. `Host` is the name under which the server was reached;
it is a foreign name if somebody has pointed their own domain at this machine (DNS rebinding).
"""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.api.errors import ApiError

#: These change nothing, and a browser does not show their answers to a page of another site.
READING_METHODS = ("GET", "HEAD")
#: A server has few names, and few pages use it.
MAX_KNOWN_ADDRESSES = 64
HOW_TO_SET_A_KEY = "start the server with a key (SGLANG_API_KEY or --api-key)"


class LoopbackOnly:
    """Refuses requests that do not come from this machine, before any route sees them.

    Pages from `origins`, which the owner has named, count as pages of this machine.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self.app, self.origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = refusal(scope["method"], Headers(scope=scope), self.origins) if scope["type"] == "http" else None
        await (refused.response(scope) if refused else self.app)(scope, receive, send)


def refusal(method: str, headers: Headers, origins: Sequence[str]) -> ApiError | None:
    """The error for a request that is refused without a key; None if the request is allowed."""
    host, origin = headers.get("host", ""), headers.get("origin")
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


@lru_cache(maxsize=MAX_KNOWN_ADDRESSES)
def is_loopback(url: str) -> bool:
    """Whether an address is a loopback address or `localhost`, which always mean this machine."""
    try:
        name = urlsplit(url).hostname
        return name == "localhost" or ip_address(name or "").is_loopback
    except ValueError:
        return False

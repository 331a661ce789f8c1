"""Without a key, only this machine may use the server, and pages from elsewhere in its browser are not this machine.

Any page can have the browser that shows it send requests here. Two headers, which a page cannot choose, tell them from
the owner's: `Origin` says where the page is from, and `Host` by which name the server was found, which is a foreign
one if somebody lets a name of theirs point to this machine (DNS rebinding).
"""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from openclaw_rl.api.errors import ApiError

#: These change nothing, and a browser does not show their answers to a page from elsewhere.
READING_METHODS = ("GET", "HEAD")
WITH_A_KEY = "start the server with a key (SGLANG_API_KEY or --api-key)"


class LoopbackOnly:
    """Refuses what does not come from this machine, before any route sees it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (refused.response() if refused else self.app)(scope, receive, send)


def refusal(method: str, headers: Headers) -> ApiError | None:
    """Why a request is not served without a key; None if it is."""
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(f"//{host}"):
        problem = f"Without an API key this server answers only to names of this machine, and {host!r} is not one"
        return ApiError(403, f"{problem}: use 127.0.0.1 or localhost, or {WITH_A_KEY}.", code="foreign_host")
    if origin is not None and method not in READING_METHODS and not is_loopback(origin):
        problem = f"Without an API key this server takes requests only from pages of this machine, not of {origin!r}"
        return ApiError(403, f"{problem}: {WITH_A_KEY}.", code="foreign_origin")
    return None


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine by its name alone, which nobody else can have."""
    try:
        name = urlsplit(url).hostname
        return name == "localhost" or ip_address(name or "").is_loopback
    except ValueError:
        return False

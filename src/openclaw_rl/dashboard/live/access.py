"""Who may see the page: a login with an API key, and a cookie that scripts cannot read."""

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from openclaw_rl.api.auth import ANYONE, KeyCheck

COOKIE = "openclaw_rl"
#: A login ends after this many seconds without a request.
IDLE_SECONDS = 12 * 3600.0
#: The most logins of one owner at once; the one that was idle longest ends first.
MAX_LOGINS = 100


@dataclass(frozen=True, slots=True)
class Viewer:
    """Whoever looks at the page."""

    owner: str
    is_operator: bool
    """May see the numbers of all users, compare policies and roll back."""
    token: str
    """Every change that the page asks for carries it, so that no other site can ask for one."""


@dataclass(slots=True)
class Login:
    """A login: whose it is, and when it was last used."""

    owner: str
    used: float


class Access:
    """Decides who may see what.

    - On a server without keys, everybody who reaches it is the operator: `LoopbackOnly` keeps others out.
    - With keys, a login takes a key. The cookie holds a random number instead of the key, and only its digest is kept.
    - Keys and tokens are compared in constant time.
    - A change needs the viewer's token, which other sites cannot read, and must not come from another site.
    """

    def __init__(self, keys: KeyCheck) -> None:
        self._keys = keys
        self._secret = secrets.token_bytes(32)
        self._logins: OrderedDict[bytes, Login] = OrderedDict()

    @property
    def needs_login(self) -> bool:
        return self._keys.are_set

    def viewer(self, request: Request) -> Viewer | None:
        """Whoever sent a request; None if they have to log in first."""
        if not self.needs_login:
            return Viewer(ANYONE, True, self._token(b""))
        cookie = request.cookies.get(COOKIE, "").encode()
        digest = hashlib.sha256(cookie).digest()
        login = self._logins.get(digest)
        now = time.monotonic()
        if login is None or now - login.used > IDLE_SECONDS:
            self._logins.pop(digest, None)
            return None
        login.used = now
        self._logins.move_to_end(digest)
        return Viewer(login.owner, self._keys.may_operate(login.owner), self._token(cookie))

    def log_in(self, key: str, request: Request, response: Response) -> bool:
        """Set the cookie if the key is known; whether it is."""
        owner = self._keys.owner_of(key.strip().encode(), request.scope)
        if owner is None:
            return False
        value = secrets.token_urlsafe(32)
        self._logins[hashlib.sha256(value.encode()).digest()] = Login(owner, time.monotonic())
        # In the order of their last use.
        own = [digest for digest, login in self._logins.items() if login.owner == owner]
        for digest in own[:-MAX_LOGINS]:
            del self._logins[digest]
        secure = request.scope["scheme"] == "https"
        response.set_cookie(COOKIE, value, path="/dashboard", httponly=True, samesite="strict", secure=secure)
        return True

    def log_out(self, request: Request, response: Response) -> None:
        self._logins.pop(hashlib.sha256(request.cookies.get(COOKIE, "").encode()).digest(), None)
        response.delete_cookie(COOKIE, path="/dashboard", httponly=True, samesite="strict")

    def may_change(self, viewer: Viewer, request: Request, token: str) -> bool:
        """Whether a change was asked for by our own page."""
        return is_same_site(request) and hmac.compare_digest(viewer.token.encode(), token.encode())

    def _token(self, cookie: bytes) -> str:
        return hmac.new(self._secret, cookie, "sha256").hexdigest()


def is_same_site(request: Request) -> bool:
    """Whether a request comes from one of our own pages, or from a program that is no browser."""
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host", ""):
        return False
    return request.headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")

"""API keys: who may use the server."""

from collections.abc import Sequence
from hmac import compare_digest

from fastapi import Request

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.options import ApiKey

#: The owner of all requests to a server without keys.
ANYONE = "anyone"


class KeyCheck:
    """Checks bearer keys. It compares with every key in constant time, so that timing reveals nothing."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(key.name, key.secret.encode()) for key in keys]

    def owner(self, request: Request) -> str:
        """The name of the key that the request carries; raises 401 if it carries no known key."""
        if not self._keys:
            return ANYONE
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip().encode() if scheme.lower() == "bearer" else b""
        matches = [name for name, secret in self._keys if compare_digest(secret, sent)]
        if not matches:
            problem = "The API key is not valid." if sent else "An API key is needed: send it as a bearer token."
            raise ApiError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return matches[0]

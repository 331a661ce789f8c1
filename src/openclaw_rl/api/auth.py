"""API keys: who may use the server, and who may operate it."""

from collections.abc import Sequence
from hmac import compare_digest

from fastapi import Request

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.options import ApiKey

#: The owner of all requests to a server without keys.
ANYONE = "anyone"


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
        return self.owner_of(sent_key(request)) if self._keys else ANYONE

    @property
    def are_set(self) -> bool:
        """Whether the server has keys."""
        return bool(self._keys)

    def owner_of(self, sent: bytes) -> str | None:
        """The name of a key; None if no key is like this one."""
        matches = [name for name, secret in self._keys if compare_digest(secret, sent)]
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

"""What went wrong on the service, in our words: is it worth another trial, and whose fault is it?"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineAway, EngineError, EngineUnavailable

#: The longest part of a service's own words that is passed on.
WORDS = 300
#: Says that a server has forgotten a model, in words of a self-hosted one, which gives no status of its own for it.
FORGOTTEN = "not loaded"


class Kind(Enum):
    """What to do about a failure."""

    AWAY = auto()
    """Nothing but wait and try again."""
    LOCKED = auto()
    """The owner has to mend it: a key, a bill."""
    LOST = auto()
    """The service does not have any more what it was asked about."""
    REFUSED = auto()
    """It understood, and will not do it."""
    BROKEN = auto()
    """It tried and failed."""


BY_STATUS = {
    401: Kind.LOCKED,
    402: Kind.LOCKED,
    403: Kind.LOCKED,
    404: Kind.LOST,
    408: Kind.AWAY,
    409: Kind.AWAY,
    410: Kind.AWAY,  # an answer that was not fetched in time
    425: Kind.AWAY,
    429: Kind.AWAY,
}


class CallFailed(Exception):
    """A call of the service failed, after all trials that it was worth."""

    def __init__(self, kind: Kind, what: str, words: str) -> None:
        super().__init__(sentence(kind, what, words))
        self.kind = kind

    def as_engine(self) -> EngineError:
        """As the rest of the program knows it."""
        if self.kind in (Kind.AWAY, Kind.LOCKED):
            return EngineAway(str(self))
        return EngineError(str(self)) if self.kind is Kind.REFUSED else EngineUnavailable(str(self))

    def as_unavailable(self) -> EngineUnavailable:
        """The same for those who wait for an answer."""
        found = self.as_engine()
        return found if isinstance(found, EngineUnavailable) else EngineUnavailable(str(self))


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of the SDK, read."""

    kind: Kind
    words: str


def sentence(kind: Kind, what: str, words: str) -> str:
    match kind:
        case Kind.LOCKED:
            return f"Tinker will not {what}: {words}. Check TINKER_API_KEY and the account."
        case Kind.AWAY:
            return f"Tinker could not {what} for now: {words}."
        case Kind.LOST:
            return f"Tinker could not {what}, since it does not have it any more: {words}."
        case Kind.REFUSED:
            return f"Tinker refused to {what}: {words}."
    return f"Tinker failed to {what}: {words}."


def read(error: BaseException) -> Failure:
    """What an error of the SDK means; it may be wrapped in others."""
    if isinstance(error, TimeoutError):
        return Failure(Kind.AWAY, str(error) or "no answer in time")
    for cause in causes(error):
        status = getattr(cause, "status_code", None)
        if isinstance(status, int):
            words = own_words(cause)
            return Failure(Kind.LOST if FORGOTTEN in words else by_status(status), f"{words} (status {status})")
        if hasattr(cause, "category"):
            words = own_words(cause)
            user = str(cause.category) == "user"
            return Failure(Kind.LOST if FORGOTTEN in words else Kind.REFUSED if user else Kind.BROKEN, words)
        if isinstance(cause, httpx.HTTPError | ConnectionError) or type(cause).__name__ == "APITimeoutError":
            return Failure(Kind.AWAY, own_words(cause))
    if type(error).__name__ in ("APIConnectionError", "RetryableException"):
        return Failure(Kind.AWAY, own_words(error))
    return Failure(Kind.BROKEN, own_words(error))


def causes(error: BaseException) -> Iterator[Any]:
    """An error and what led to it."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def by_status(status: int) -> Kind:
    return BY_STATUS.get(status, Kind.AWAY if status >= 500 else Kind.REFUSED)


def own_words(error: Any) -> str:
    """What a service says itself, without its form and on one line."""
    body = getattr(error, "body", None)
    said = body.get("detail") or body.get("message") or body.get("error") if isinstance(body, dict) else None
    if isinstance(said, list):
        said = "; ".join(str(item.get("msg", item)) if isinstance(item, dict) else str(item) for item in said)
    text = " ".join(str(said or error).split()).rstrip(".")
    return text[:WORDS] or type(error).__name__


class LastWords(logging.Handler):
    """Remembers what the SDK last warned of: while it waits by itself (a bill, a full queue), only its log says why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())[:WORDS].rstrip(".")

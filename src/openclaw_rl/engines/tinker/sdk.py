"""Tinker's SDK, imported when it is needed and without PyTorch: what it can do, and what its errors mean.

Tested with 0.12 and 0.36. Differences are found by looking at the SDK's functions, never by its version number.
"""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineAway, EngineError, EngineUnavailable

MISSING = "The tinker backend needs Tinker's SDK: pip install 'openclaw-rl[tinker]', or use --backend local."
#: Telemetry could contain what users said, so it is off unless the variable is set.
QUIET = {"TINKER_TELEMETRY": "0"}
#: Characters of the service's own message that are passed on.
MAX_MESSAGE_LENGTH = 300
#: With these words a self-hosted server says that it has lost a model; it has no status code for it.
FORGOTTEN = "not loaded"


def installed() -> bool:
    return importlib.util.find_spec("tinker") is not None


def load() -> Any:
    """The SDK's module. Raises EngineUnavailable if it is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        with without_torch():
            return importlib.import_module("tinker")
    except ImportError as error:
        raise EngineUnavailable(MISSING) from error


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import as if PyTorch were not installed: the SDK would load it into the server, which does not need it."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def failures() -> tuple[type[Exception], ...]:
    """The errors that a call of the SDK may raise: its own, and those of the libraries that it uses."""
    sdk = load()
    broken: type[Exception] = importlib.import_module("tinker.lib.retryable_exception").RetryableException
    return (sdk.TinkerError, broken, httpx.HTTPError, ValueError, RuntimeError, OSError)


def takes(function: Any, name: str) -> bool:
    """Whether a function of the SDK has a parameter."""
    return name in inspect.signature(function).parameters


def is_deprecated(function: Any) -> bool:
    """Whether the SDK warns against a function, because it has a better one."""
    return hasattr(function, "__deprecated__")


class Kind(Enum):
    """What to do about a failure."""

    AWAY = auto()
    """Wait and try again."""
    LOCKED = auto()
    """The owner has to fix it: a key, a bill."""
    LOST = auto()
    """The service has lost what the call was about."""
    REFUSED = auto()
    """The service understood the call and will not do it."""
    BROKEN = auto()
    """The service tried and failed."""


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
    """A call of the service failed, also when it was tried again."""

    def __init__(self, kind: Kind, what: str, words: str) -> None:
        super().__init__(sentence(kind, what, words))
        self.kind = kind

    def as_engine(self) -> EngineError:
        """The error that the rest of the program knows."""
        if self.kind in (Kind.AWAY, Kind.LOCKED):
            return EngineAway(str(self))
        return EngineError(str(self)) if self.kind is Kind.REFUSED else EngineUnavailable(str(self))

    def as_unavailable(self) -> EngineUnavailable:
        """The same, for a client that waits for tokens."""
        error = self.as_engine()
        return error if isinstance(error, EngineUnavailable) else EngineUnavailable(str(self))


@dataclass(frozen=True, slots=True)
class Failure:
    """What an error of the SDK means."""

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


def read_error(error: BaseException) -> Failure:
    """Find out what an error of the SDK means; the cause may be wrapped in other errors."""
    if isinstance(error, TimeoutError):
        return Failure(Kind.AWAY, str(error) or "no answer in time")
    for cause in causes(error):
        status = getattr(cause, "status_code", None)
        if isinstance(status, int):
            words = service_message(cause)
            return Failure(Kind.LOST if FORGOTTEN in words else by_status(status), f"{words} (status {status})")
        if hasattr(cause, "category"):
            words = service_message(cause)
            user = str(cause.category) == "user"
            return Failure(Kind.LOST if FORGOTTEN in words else Kind.REFUSED if user else Kind.BROKEN, words)
        if isinstance(cause, httpx.HTTPError | ConnectionError) or type(cause).__name__ == "APITimeoutError":
            return Failure(Kind.AWAY, service_message(cause))
    if type(error).__name__ in ("APIConnectionError", "RetryableException"):
        return Failure(Kind.AWAY, service_message(error))
    return Failure(Kind.BROKEN, service_message(error))


def causes(error: BaseException) -> Iterator[Any]:
    """An error and its chain of causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def by_status(status: int) -> Kind:
    return BY_STATUS.get(status, Kind.AWAY if status >= 500 else Kind.REFUSED)


def service_message(error: Any) -> str:
    """The service's message without its JSON, on one line."""
    body = getattr(error, "body", None)
    message = body.get("detail") or body.get("message") or body.get("error") if isinstance(body, dict) else None
    if isinstance(message, list):
        message = "; ".join(str(item.get("msg", item)) if isinstance(item, dict) else str(item) for item in message)
    text = " ".join(str(message or error).split()).rstrip(".")
    return text[:MAX_MESSAGE_LENGTH] or type(error).__name__


class LastWarning(logging.Handler):
    """Keeps the SDK's last warning: while the SDK waits (for a bill, for a full queue), only its log says why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())[:MAX_MESSAGE_LENGTH].rstrip(".")

"""Imports the Tinker SDK when it is needed, without PyTorch, and finds out what the installed version can do.

Tested with 0.12 and 0.36. Differences are found by looking at the SDK's functions, never by its version number.
"""

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineUnavailable

MISSING = "The tinker backend needs Tinker's SDK: pip install 'openclaw-rl[tinker]', or use --backend local."
#: Telemetry could contain what users said, so it is off unless the variable is set.
QUIET = {"TINKER_TELEMETRY": "0"}


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

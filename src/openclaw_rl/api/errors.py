"""Errors in the shape of OpenAI's API; for Anthropic's and Ollama's clients, in the shape of theirs."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from openclaw_rl.engines.base import ApiRefused, ConstraintRefused, EngineUnavailable, QueueFull
from openclaw_rl.ledger import errors as ledger_errors
from openclaw_rl.ledger.errors import BadResult, CaptureSuspended, LedgerError

#: The paths of OpenAI's API begin with this. Some clients add it themselves, others expect it in their base URL.
PATH_PREFIX = "/v1"
#: OpenAI's error types by status.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
#: Anthropic's error types by status.
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
#: The paths of Anthropic's API begin with this, and its clients send this header everywhere.
ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_HEADER = "anthropic-version"
#: So do those of Ollama's own API.
OLLAMA_PATHS = "/api/"
#: What the ledger refuses: status, code, and the field at fault.
LEDGER_REFUSALS: Mapping[type[LedgerError], tuple[int, str, str | None]] = {
    ledger_errors.UnknownTurn: (404, "unknown_completion", "id"),
    ledger_errors.DamagedTurn: (410, "damaged", "id"),
    ledger_errors.CannotJudge: (409, "too_late", None),
    ledger_errors.CannotDelete: (409, "cannot_delete", "id"),
    ledger_errors.AlreadyRewarded: (409, "already_rewarded", None),
    ledger_errors.TooLate: (409, "too_late", None),
    ledger_errors.UnknownNote: (404, "unknown_note", None),
    ledger_errors.TooManyNotes: (409, "too_many_notes", None),
    ledger_errors.CannotPractise: (409, "cannot_practise", None),
    ledger_errors.UnknownLease: (404, "unknown_lease", "lease"),
    ledger_errors.LeaseRefused: (409, "lease_ended", "lease"),
}


class ApiError(Exception):
    """A refused request: an HTTP status and a sentence, and where known a code and the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status > 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        kind = ANTHROPIC_ERROR_TYPES.get(self.status, "api_error" if self.status > 500 else "invalid_request_error")
        # Claude Code shortens its history when it reads these words.
        start = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        return {"type": "error", "error": {"type": kind, "message": start + self.message}}

    def ollama_body(self) -> dict[str, str]:
        return {"error": self.message}

    def response(self, scope: Scope | None = None) -> JSONResponse:
        """The answer to the request with this `scope`, in the shape that its client knows."""
        body: dict[str, Any] = self.body()
        if scope and str(scope["path"]).startswith(OLLAMA_PATHS):
            body = self.ollama_body()
        elif scope and is_anthropic(scope):
            body = self.anthropic_body()
        return JSONResponse(body, self.status, self.headers)


def is_anthropic(scope: Scope) -> bool:
    """Whether a client of Anthropic's API sent a request."""
    return str(scope["path"]).startswith(ANTHROPIC_PATHS) or ANTHROPIC_HEADER in Headers(scope=scope)


def from_engine(error: QueueFull | EngineUnavailable) -> ApiError:
    """The error for a request that the engine cannot accept or finish."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, ConstraintRefused):
        return ApiError(400, str(error), code="invalid_schema")
    if isinstance(error, ApiRefused):
        later = {"Retry-After": str(math.ceil(error.retry_after))} if error.retry_after is not None else None
        return ApiError(error.status, str(error), code=error.code, headers=later)
    return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "1"})


@contextlib.contextmanager
def refusals_of_ledger(unavailable: str) -> Iterator[None]:
    """Turn what the ledger refuses into errors; `unavailable` says what cannot be done while it cannot be used."""
    try:
        yield
    except CaptureSuspended as error:
        raise ApiError(503, f"{unavailable} at the moment: {error}.") from error
    except BadResult as error:
        raise ApiError(400, str(error), param=error.field) from error
    except tuple(LEDGER_REFUSALS) as error:
        status, code, param = LEDGER_REFUSALS[type(error)]
        raise ApiError(status, str(error), code=code, param=param) from error


def from_router(request: Request, error: HTTPException) -> ApiError:
    """The error for a path or method that the server does not have."""
    absent = f"There is no {request.method} {path_of(request)} here"
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 404:
        meant = path_meant(request)
        advice = f"did you mean {meant}?" if meant else f"this server has {', '.join(route_names(request.app))}."
        return ApiError(404, f"{absent}; {advice}", code="unknown_url", headers=headers)
    if error.status_code == 405 and headers:
        message = f"{absent}, only {headers['Allow']}."
        return ApiError(405, message, code="method_not_supported", headers=headers)
    return ApiError(error.status_code, f"{error.detail}.", headers=headers)


def path_of(request: Request) -> str:
    """Not of `request.url`, which fails if the query is no UTF-8."""
    return str(request.scope["path"])


def path_meant(request: Request) -> str | None:
    """The path that exists if one `/v1` is added or removed, or slashes at the end are removed; None if none does."""
    path = path_of(request).rstrip("/")
    for other in (path, PATH_PREFIX + path, path.removeprefix(PATH_PREFIX)):
        scope = {**request.scope, "path": other}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            return other
    return None


def route_names(app: FastAPI) -> list[str]:
    """Every route with its method."""
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    return [f"{method} {route.path_format}" for route in routes for method in sorted(route.methods or ())]


def install(app: FastAPI) -> None:
    """Make every error of the app an answer in the client's shape, without a traceback."""

    async def api_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return from_router(request, error).response(request.scope)

    async def unexpected(request: Request, _error: Exception) -> JSONResponse:
        return ApiError(500, "Internal error; the server's log has the details.").response(request.scope)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unexpected)

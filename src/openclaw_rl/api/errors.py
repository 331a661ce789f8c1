"""Errors as OpenAI's API shapes them, so that every client understands them."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from openclaw_rl.engines.base import EngineUnavailable, QueueFull

#: OpenAI's error types by status.
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class ApiError(Exception):
    """A refusal with a status, a sentence, and where known a code and the field that is at fault."""

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
        self.status, self.message = status, message
        self.code, self.param = code, param
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def from_engine(error: QueueFull | EngineUnavailable) -> ApiError:
    """What a client is told when the engine cannot take or finish a request."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "1"})


def install(app: FastAPI) -> None:
    """Every error of an app in one shape, without a traceback."""

    async def refused(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def http(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers) if error.headers else None
        return ApiError(error.status_code, f"{error.detail}.", headers=headers).response()

    async def unexpected(_request: Request, _error: Exception) -> JSONResponse:
        return ApiError(500, "Something went wrong in the server; its log says what.").response()

    app.add_exception_handler(ApiError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unexpected)

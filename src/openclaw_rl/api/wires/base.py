"""What every wire has in common."""

from collections.abc import AsyncIterator, Container, Mapping
from typing import Any, Protocol

from pydantic import ValidationError
from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import CaptureFields, ChatRequest, check_supported, malformed


class Wire(Protocol):
    """One request as its client writes it, and its answer as the client reads it. A new object for each request."""

    id_prefix: str
    """How the ids of answers begin."""
    names: Mapping[str, str]
    """The wire's own names of chat fields, for errors."""

    def parse(self, body: bytes) -> ChatRequest:
        """Translate the request's body. Raises ApiError. May be called in a thread."""

    async def whole(self, completion: Completion) -> bytes:
        """The body of an answer that is not streamed."""

    def events(self, completion: Completion) -> AsyncIterator[bytes]:
        """Server-sent events, each as soon as it is known. An error after the start is sent as an event."""


def event(name: str, body: Mapping[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + to_json(body) + b"\n\n"


def capture_fields(request: CaptureFields) -> dict[str, Any]:
    return {name: getattr(request, name) for name in CaptureFields.model_fields}


def chat_request(**fields: Any) -> ChatRequest:
    """The chat request with these fields. Raises ApiError."""
    try:
        return check_supported(ChatRequest.model_validate(fields))
    except ValidationError as error:
        raise malformed(error) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error for the field's name on another wire."""
    field, dot, rest = (error.param or "").partition(".")
    if field in names:
        error.param = names[field] + dot + rest
        error.message = error.message.replace(field, names[field])
    return error


def first_unknown(parts: Any, known: Container[Any]) -> str | None:
    """The first type in a list of typed parts that is not known; None if all are, or if these are not parts."""
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, dict) and part.get("type") not in known:
            return str(part.get("type"))
    return None

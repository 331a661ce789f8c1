"""What every wire has in common."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from pydantic import ValidationError
from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.translated import TranslatedRequest
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


def chat_request(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    """The chat request with these messages, which have been checked, and these fields. Raises ApiError."""
    if not messages:
        raise ApiError(400, "messages must not be empty.", param="messages")
    try:
        return check_supported(TranslatedRequest.model_validate({"translated": messages, **fields}))
    except ValidationError as error:
        raise malformed(error) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error for the field's name on another wire."""
    field, dot, rest = (error.param or "").partition(".")
    if field in names:
        error.param = names[field] + dot + rest
        error.message = error.message.replace(field, names[field])
    return error

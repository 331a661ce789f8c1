"""OpenAI's Responses API."""

from typing import Any

from fastapi import APIRouter, Request, Response

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.routes.answering import answer
from openclaw_rl.api.routes.plain import post
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wires.responses_answer import ResponsesWire
from openclaw_rl.api.wires.responses_request import ResponsesRequest
from openclaw_rl.api.wires.responses_stored import stored_response
from openclaw_rl.ledger.errors import CannotDelete, CaptureSuspended, UnknownTurn

router = APIRouter()


@post(router, "/v1/responses", ResponsesRequest)
async def responses(request: Request) -> Response:
    """Answer input items, either at once or as a stream of server-sent events."""
    server = server_of(request)
    capture = server.service.capture
    # `answer` refuses a request without a known key.
    owner = server.keys.known_owner(request) or ""
    return await answer(request, ResponsesWire(server.model, owner, capture.ledger if capture else None))


@router.get("/v1/responses/{id}")
async def stored(id: str, request: Request) -> dict[str, Any]:
    """A recorded response."""
    server = server_of(request)
    owner = server.keys.owner(request)
    try:
        return stored_response(server.ledger().find_turn(owner, id), server.model)
    except UnknownTurn as error:
        raise unknown(id) from error
    except CaptureSuspended as error:
        raise ApiError(503, f"Responses cannot be read at the moment: {error}.") from error


@router.delete("/v1/responses/{id}")
async def delete(id: str, request: Request) -> dict[str, Any]:
    """Delete a recorded response for good."""
    server = server_of(request)
    owner = server.keys.owner(request)
    try:
        await server.ledger().delete_answer(owner, id)
    except UnknownTurn as error:
        raise unknown(id) from error
    except CannotDelete as error:
        raise ApiError(409, str(error), code="cannot_delete", param="id") from error
    except CaptureSuspended as error:
        raise ApiError(503, f"The response cannot be deleted at the moment: {error}.") from error
    return {"id": id, "object": "response", "deleted": True}


def unknown(id: str) -> ApiError:
    return ApiError(404, f"You have no response {id!r}.", code="not_found", param="id")

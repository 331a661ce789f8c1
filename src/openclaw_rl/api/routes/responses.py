"""OpenAI's Responses API."""

from fastapi import APIRouter, Request, Response

from openclaw_rl.api.routes.answering import answer
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wires.responses_answer import ResponsesWire
from openclaw_rl.api.wires.responses_request import ResponsesRequest

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Answer input items, either at once or as a stream of server-sent events."""
    server = server_of(request)
    capture = server.service.capture
    # `answer` refuses a request without a known key.
    owner = server.keys.known_owner(request) or ""
    return await answer(request, ResponsesWire(server.model, owner, capture.ledger if capture else None))

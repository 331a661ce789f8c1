"""Anthropic's Messages API."""

from fastapi import APIRouter, Request, Response

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.routes.answering import answer, read
from openclaw_rl.api.routes.plain import post
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wires.base import renamed
from openclaw_rl.api.wires.messages_answer import MessagesWire
from openclaw_rl.api.wires.messages_request import MessagesRequest

router = APIRouter()


@post(router, "/v1/messages", MessagesRequest)
async def messages(request: Request) -> Response:
    """Answer a conversation of Anthropic's clients, either at once or as a stream of server-sent events."""
    return await answer(request, MessagesWire(server_of(request).model))


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(MessagesRequest))
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens the model would be given, notes included. Nothing is sampled or recorded."""
    server = server_of(request)
    owner = server.keys.owner(request)
    wire = MessagesWire(server.model)
    try:
        incoming = await read(server, request, wire)
        tokens = await server.service.count(incoming, owner, request.headers)
    except ApiError as error:
        raise renamed(error, wire.names) from error
    return {"input_tokens": tokens}

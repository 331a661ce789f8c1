"""Chat completions."""

from fastapi import APIRouter, Request, Response

from openclaw_rl.api.encode import ChatWire
from openclaw_rl.api.routes.answering import answer
from openclaw_rl.api.routes.plain import post
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wire import ChatRequest

router = APIRouter()


@post(router, "/v1/chat/completions", ChatRequest)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, either at once or as a stream of server-sent events."""
    return await answer(request, ChatWire(server_of(request).encoder))

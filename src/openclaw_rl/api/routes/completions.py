"""OpenAI's legacy completions."""

from fastapi import APIRouter, Request, Response

from openclaw_rl.api.routes.answering import answer
from openclaw_rl.api.routes.plain import post
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wires.completions import CompletionsRequest, CompletionsWire

router = APIRouter()


@post(router, "/v1/completions", CompletionsRequest)
async def completions(request: Request) -> Response:
    """Continue a text, either at once or as a stream of server-sent events."""
    server = server_of(request)
    return await answer(request, CompletionsWire(server.model, server.service.renderer.tokenizer.backend))

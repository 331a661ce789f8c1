"""Chat completions."""

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.encode import Encoder
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wire import ChatRequest

#: Tells proxies to pass a stream on piece by piece.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, either at once or as a stream of server-sent events."""
    server = server_of(request)
    try:
        owner = server.keys.owner(request)
        async with server.bodies.read(request, server.bodies.max_bytes) as content:
            incoming = await server.service.reader.read(content)
        if incoming.request.model is not None:
            server.check_model(incoming.request.model)
        completion = await server.service.begin(incoming, owner, request.headers)
    except ApiError:
        server.service.metrics.requests["refused"].inc()
        raise
    return await answer(request, incoming.request, completion, server.encoder)


async def answer(request: Request, body: ChatRequest, completion: Completion, encoder: Encoder) -> Response:
    watch = asyncio.create_task(close_on_disconnect(request, completion))
    try:
        await completion.ready()
        if not body.stream:
            content = await encoder.whole(completion, body.top_logprobs_wanted)
            return Response(content, media_type="application/json")
    finally:
        watch.cancel()
    chunks = encoder.chunks(completion, body.top_logprobs_wanted, body.wants_usage)
    return StreamingResponse(chunks, media_type="text/event-stream", headers=STREAM_HEADERS)


async def close_on_disconnect(request: Request, completion: Completion) -> None:
    """Stop the generation when the client disconnects. The body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    completion.close()

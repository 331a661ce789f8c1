"""Answers one request, on whichever wire it came."""

import asyncio

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.reader import ReadRequest
from openclaw_rl.api.state import ServerState, server_of
from openclaw_rl.api.wires.base import Wire, renamed

#: Tells proxies to pass a stream on piece by piece.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def answer(request: Request, wire: Wire) -> Response:
    """Read a request, sample, and send the answer, either at once or as a stream of server-sent events."""
    server = server_of(request)
    try:
        owner = server.keys.owner(request)
        incoming = await read(server, request, wire)
        completion = await server.service.begin(incoming, owner, request.headers, wire.id_prefix)
    except ApiError as error:
        server.service.metrics.requests["refused"].inc()
        raise renamed(error, wire.names) from error
    watch = asyncio.create_task(close_on_disconnect(request, completion))
    try:
        await completion.ready()
        if not incoming.request.stream:
            return Response(await wire.whole(completion), media_type="application/json")
    finally:
        watch.cancel()
    return StreamingResponse(wire.events(completion), media_type="text/event-stream", headers=STREAM_HEADERS)


async def read(server: ServerState, request: Request, wire: Wire) -> ReadRequest:
    """The request and its prompt. Raises ApiError."""
    async with server.bodies.read(request, server.bodies.max_bytes) as content:
        incoming = await server.service.reader.read(content, wire.parse)
    if incoming.request.model is not None:
        server.check_model(incoming.request.model)
    return incoming


async def close_on_disconnect(request: Request, completion: Completion) -> None:
    """Stop the generation when the client disconnects. The body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    completion.close()

"""The routes that answer: chat, Anthropic's Messages, OpenAI's Responses and legacy completions, Ollama's own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError, refusals_of_ledger
from openclaw_rl.api.reader import RawRequest
from openclaw_rl.api.service import OperationFailed, ServerState, server_of
from openclaw_rl.api.wire import ChatRequest, body_schema
from openclaw_rl.api.wires.base import Wire, renamed
from openclaw_rl.api.wires.chat import ChatWire
from openclaw_rl.api.wires.completions import CompletionsRequest, CompletionsWire
from openclaw_rl.api.wires.messages import MessagesRequest, MessagesWire
from openclaw_rl.api.wires.ollama import OllamaChat, OllamaPrompt, OllamaWire
from openclaw_rl.api.wires.responses import ResponsesWire, stored_response
from openclaw_rl.api.wires.responses_request import ResponsesRequest
from openclaw_rl.ledger.deletion import delete_answer
from openclaw_rl.ledger.errors import UnknownTurn
from openclaw_rl.ledger.turns import find_turn
from openclaw_rl.types import SHARED

router = APIRouter()

#: Tells proxies to pass a stream on piece by piece.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
WATCH_AFTER_SECONDS = 0.02
Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoute(APIRoute):
    """Gives the request to its endpoint and sends the response, without FastAPI's dependencies.

    FastAPI's routes resolve dependencies and open three exit stacks for each request, which takes as long as
    parsing a short one.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.app = self._answer

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.endpoint(Request(scope, receive, send))
        except ApiError as error:
            response = error.response(scope)
        await response(scope, receive, send)


def post(path: str, body: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
    """Add an endpoint that reads its body itself; `body` describes it in the schema."""

    def add(endpoint: Endpoint) -> Endpoint:
        router.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=body_schema(body), route_class_override=DirectRoute
        )
        return endpoint

    return add


async def answer(request: Request, wire: Wire) -> Response:
    """Read a request, sample, and send the answer, either at once or as a stream of server-sent events."""
    server = server_of(request)
    try:
        owner = server.keys.owner(request)
        async with server.bodies.read(request, server.bodies.max_bytes) as content:
            raw = raw_request(server, request, wire, owner, content)
            incoming, completion = await server.service.begin(raw, lambda: wire.id_prefix)
    except ApiError as error:
        server.service.metrics.requests["refused"].inc()
        raise renamed(error, wire.names) from error
    watch = DisconnectWatch(request, completion)
    try:
        await completion.ready()
        if not incoming.request.stream:
            return Response(await wire.whole(completion), media_type="application/json")
    finally:
        watch.cancel()
    return StreamingResponse(wire.events(completion), media_type=wire.media_type, headers=STREAM_HEADERS)


def raw_request(server: ServerState, request: Request, wire: Wire, owner: str, content: bytes) -> RawRequest:
    """A request whose body has been read."""
    line = SHARED

    def parse(body: bytes) -> ChatRequest:
        nonlocal line
        asked = wire.parse(body)
        line = server.line_for(owner, asked.model)
        return asked

    async def ready_line() -> str:
        if line != SHARED:
            try:
                await server.operations.serve_line(line)
            except OperationFailed as error:
                raise ApiError(503, str(error), code="line_unavailable") from error
        return line

    # A dict, because Starlette's headers search all of them whenever they are asked for one. The first one counts.
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.scope["headers"])}
    return RawRequest(content, parse, owner, headers, ready_line)


class DisconnectWatch:
    """Stops the generation when the client disconnects. The body must have been read before.

    It begins after a moment, because a task takes longer than the rest of a short answer that is there at once.
    """

    def __init__(self, request: Request, completion: Completion) -> None:
        self._request = request
        self._completion = completion
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._begin)

    def cancel(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._completion.close()


@post("/v1/chat/completions", ChatRequest)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, either at once or as a stream of server-sent events."""
    server = server_of(request)
    return await answer(request, ChatWire(server.model, server.service.tokenizer))


@post("/v1/messages", MessagesRequest)
async def messages(request: Request) -> Response:
    """Answer a conversation of Anthropic's clients, either at once or as a stream of server-sent events."""
    return await answer(request, MessagesWire(server_of(request).model))


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(MessagesRequest))
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens the model would be given, notes included. Nothing is sampled or recorded."""
    return {"input_tokens": await counted(request, MessagesWire(server_of(request).model))}


async def counted(request: Request, wire: Wire) -> int:
    """How many tokens the prompt of a request has. Raises ApiError."""
    server = server_of(request)
    try:
        owner = server.keys.owner(request)
        async with server.bodies.read(request, server.bodies.max_bytes) as content:
            return await server.service.count(raw_request(server, request, wire, owner, content))
    except ApiError as error:
        raise renamed(error, wire.names) from error


@post("/v1/responses", ResponsesRequest)
async def responses(request: Request) -> Response:
    """Answer input items, either at once or as a stream of server-sent events."""
    return await answer(request, responses_wire(request))


@router.post("/v1/responses/input_tokens", openapi_extra=body_schema(ResponsesRequest))
async def count_input_tokens(request: Request) -> dict[str, Any]:
    """How many tokens the model would be given, notes included. Nothing is sampled or recorded."""
    return {"object": "response.input_tokens", "input_tokens": await counted(request, responses_wire(request))}


def responses_wire(request: Request) -> ResponsesWire:
    server = server_of(request)
    capture = server.service.capture
    # Whoever reads the request refuses one without a known key.
    owner = server.keys.known_owner(request) or ""
    return ResponsesWire(server.model, owner, capture.ledger if capture else None)


@router.get("/v1/responses/{id}")
async def stored(id: str, request: Request) -> dict[str, Any]:
    """A recorded response."""
    server = server_of(request)
    owner = server.keys.owner(request)
    with refusals_of_ledger("Responses cannot be read"), unknown_response(id):
        return stored_response(server.ledger().read(find_turn, owner, id), server.model)


@router.delete("/v1/responses/{id}")
async def delete(id: str, request: Request) -> dict[str, Any]:
    """Delete a recorded response for good."""
    server = server_of(request)
    owner = server.keys.owner(request)
    with refusals_of_ledger("The response cannot be deleted"), unknown_response(id):
        await server.ledger().write(delete_answer, owner, id)
    return {"id": id, "object": "response", "deleted": True}


@contextlib.contextmanager
def unknown_response(id: str) -> Iterator[None]:
    try:
        yield
    except UnknownTurn as error:
        raise ApiError(404, f"You have no response {id!r}.", code="not_found", param="id") from error


@post("/v1/completions", CompletionsRequest)
async def completions(request: Request) -> Response:
    """Continue a text, either at once or as a stream of server-sent events."""
    server = server_of(request)
    return await answer(request, CompletionsWire(server.model, server.service.tokenizer))


@post("/api/chat", OllamaChat)
async def ollama_chat(request: Request) -> Response:
    """Answer a conversation of Ollama's clients, as lines of JSON unless they want it whole."""
    return await answer(request, OllamaWire(server_of(request).model, is_chat=True))


@post("/api/generate", OllamaPrompt)
async def ollama_generate(request: Request) -> Response:
    """Answer one prompt of Ollama's clients, as lines of JSON unless they want it whole."""
    return await answer(request, OllamaWire(server_of(request).model, is_chat=False))

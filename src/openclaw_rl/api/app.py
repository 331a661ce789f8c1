"""The HTTP application: routes, and nothing that a route does not need."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from openclaw_rl import __version__
from openclaw_rl.api import errors
from openclaw_rl.api.auth import KeyCheck
from openclaw_rl.api.completion import ChatService, Completion
from openclaw_rl.api.encode import Encoder
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.loopback import LoopbackOnly
from openclaw_rl.api.operations import NoOperations, OperationFailed, Operations
from openclaw_rl.api.wire import ChatRequest, FeedbackRequest, RollbackRequest, parse, parse_feedback, parse_request
from openclaw_rl.app.config import ApiKey
from openclaw_rl.ledger.changes import CannotJudge, UnknownTurn
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.writer import CaptureSuspended
from openclaw_rl.types import SessionKey

#: Proxies must pass a stream on piece by piece.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(
    service: ChatService,
    model: str,
    *,
    aliases: Sequence[str] = (),
    keys: Sequence[ApiKey] = (),
    max_body_bytes: int = 32 << 20,
    operations: Operations | None = None,
) -> FastAPI:
    """The server's application for one model, known to clients as `model` or one of `aliases`."""
    loops = operations or NoOperations()
    # No page of documentation: FastAPI's loads its parts from elsewhere, and nothing here calls anybody.
    app = FastAPI(title="openclaw-rl", version=__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    if not keys:
        app.add_middleware(LoopbackOnly)
    check = KeyCheck(keys)
    encoder = Encoder(model, service.renderer.tokenizer.backend)
    started = int(time.time())
    known = {model, *aliases}

    @app.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, whole or as a stream of server-sent events."""
        try:
            owner = check.owner(request)
            body = parse_request(await read_body(request, max_body_bytes))
            if body.model is not None and body.model not in known:
                raise unknown_model(body.model, model)
            completion = await service.begin(body, owner, request.headers)
        except ApiError:
            service.metrics.requests["refused"].inc()
            raise
        return await answer(request, body, completion)

    async def answer(request: Request, body: ChatRequest, completion: Completion) -> Response:
        leaving = asyncio.create_task(close_when_gone(request, completion))
        try:
            await completion.ready()
            if not body.stream:
                whole = await encoder.whole(completion, body.named_logprobs)
                return Response(whole, media_type="application/json")
        finally:
            leaving.cancel()
        chunks = encoder.chunks(completion, body.named_logprobs, body.wants_usage)
        return StreamingResponse(chunks, media_type="text/event-stream", headers=STREAM_HEADERS)

    @app.post("/v1/feedback", openapi_extra=body_schema(FeedbackRequest))
    async def feedback(request: Request) -> dict[str, str]:
        """Say of an answer how good it was: the id of its completion, and a score or a thumb."""
        owner = check.owner(request)
        given = parse_feedback(await read_body(request, max_body_bytes))
        try:
            await ledger().add_feedback(owner, given.id, given.choice, given.feedback())
        except UnknownTurn as error:
            raise ApiError(404, str(error), code="unknown_completion", param="id") from error
        except CannotJudge as error:
            raise ApiError(409, str(error), code="too_late") from error
        except CaptureSuspended as error:
            raise ApiError(503, f"Feedback cannot be stored at the moment: {error}.") from error
        return {"id": given.id, "status": "recorded"}

    @app.post("/v1/sessions/{name:path}/close")
    async def close_session(name: str, request: Request) -> dict[str, str]:
        """End a session: its last turn will not get a next state."""
        owner = check.owner(request)
        try:
            known_session = await ledger().close_session(SessionKey(owner, name))
        except CaptureSuspended as error:
            raise ApiError(503, f"The session cannot be closed at the moment: {error}.") from error
        if not known_session:
            raise ApiError(404, f"There is no session {name!r} of yours.", code="unknown_session")
        return {"id": name, "status": "closed"}

    @app.post("/v1/policy/rollback", openapi_extra=body_schema(RollbackRequest))
    async def roll_back(request: Request) -> dict[str, int]:
        """Serve an earlier policy from now on, and learn on from it."""
        check.owner(request)
        wanted = parse(RollbackRequest, await read_body(request, max_body_bytes) or b"{}")
        try:
            return {"policy_version": await loops.roll_back(wanted.version)}
        except OperationFailed as error:
            raise ApiError(409, str(error), code="cannot_roll_back", param="version") from error

    def ledger() -> Ledger:
        if service.capture is None:
            raise ApiError(404, "This server does not capture turns (--no-capture).", code="capture_off")
        return service.capture.ledger

    # Clients ask for the models before they have a key, and the answer holds no secret.
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [model_entry(model, started)]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The model that is served, if that is its name."""
        if name not in known:
            raise unknown_model(name, model)
        return model_entry(model, started)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the server runs."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """Whether requests are served now."""
        stats = service.sampler.stats()
        body = {"ready": stats.ready, "policy_version": service.sampler.newest_version, "detail": stats.detail}
        upcoming = loops.next_step()
        parts = {
            "capture": service.capture_status(),
            "judge": loops.judge(),
            "learner": loops.learner(),
            "next_step": asdict(upcoming) if upcoming else None,
        }
        return JSONResponse({**body, **parts}, 200 if stats.ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Counters for Prometheus."""
        check.owner(request)
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app


async def read_body(request: Request, limit: int) -> bytes:
    """The request's body; raises 413 as soon as it is too long, whatever its length header says."""
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise ApiError(413, f"The request is larger than {limit / 1e6:g} MB (--max-request-mb).")
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "The client left before its request was whole.") from None
    return b"".join(parts)


async def close_when_gone(request: Request, completion: Completion) -> None:
    """Stop the generation when the client leaves. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    completion.close()


def unknown_model(name: str, model: str) -> ApiError:
    message = f"The model {name!r} does not exist; this server has {model!r}."
    return ApiError(404, message, code="model_not_found", param="model")


def model_entry(model: str, created: int) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": created, "owned_by": "openclaw-rl"}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The request body for /docs; the route reads the body itself, so FastAPI cannot know it."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": inline(schema, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema without references."""
    if isinstance(schema, list):
        return [inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inline(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return {key: inline(value, definitions) for key, value in schema.items()}

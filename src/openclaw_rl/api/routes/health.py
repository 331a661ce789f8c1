"""The model that is served, whether the server is ready, and its counters.

The routes of models need no key: clients list models before they have one.
"""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from openclaw_rl import __version__
from openclaw_rl.api.service import ServerState, body_of, server_of
from openclaw_rl.api.wire import body_schema
from openclaw_rl.api.wires.ollama import OllamaName
from openclaw_rl.engines.base import EngineStats
from openclaw_rl.ledger import groups
from openclaw_rl.ledger.errors import CaptureSuspended

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served, and each of its lines that the key may use."""
    server = server_of(request)
    owner = server.keys.known_owner(request)
    lines = server.lines_for(owner) if owner is not None else []
    entries = [model_entry(server, name) for name in (server.model, *(f"{server.model}:{line}" for line in lines))]
    pages = {"has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}
    return {"object": "list", "data": entries, **pages}


@router.get("/v1/models/{name:path}")
async def one_model(name: str, request: Request) -> dict[str, Any]:
    """The model that is served, if it has this name."""
    server = server_of(request)
    server.line_for(server.keys.known_owner(request) or "", name)
    return model_entry(server, name if ":" in name else server.model)


def model_entry(server: ServerState, name: str) -> dict[str, Any]:
    """The fields that OpenAI's clients read, then those that Anthropic's read."""
    return {
        "id": name,
        "object": "model",
        "created": server.started,
        "owned_by": "openclaw-rl",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(server.started, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": server.service.sampler.limits.max_context_tokens,
    }


#: What Ollama says of a model's file, which is not here.
OLLAMA_DETAILS = {"format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}


@router.get("/api/tags")
async def ollama_tags(request: Request) -> dict[str, Any]:
    """The model that is served, for Ollama's clients."""
    server = server_of(request)
    changed = datetime.fromtimestamp(server.started, UTC).isoformat()
    entry = {"name": server.model, "model": server.model, "modified_at": changed, "size": 0, "digest": ""}
    return {"models": [{**entry, "details": OLLAMA_DETAILS}]}


@router.post("/api/show", openapi_extra=body_schema(OllamaName))
async def ollama_show(request: Request) -> dict[str, Any]:
    """What Ollama's clients ask about a model before they use it."""
    server = server_of(request)
    body = await body_of(request, OllamaName)
    server.line_for(server.keys.known_owner(request) or "", body.given)
    context = server.service.sampler.limits.max_context_tokens
    return {
        "details": OLLAMA_DETAILS,
        "model_info": {"general.architecture": "openclaw", "openclaw.context_length": context},
        "capabilities": ["completion", "tools"],
    }


@router.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """For clients that look whether a server speaks Ollama's API."""
    return {"version": __version__}


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the server runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Whether the server can answer requests now; for those who have a key also how its parts are doing."""
    server = server_of(request)
    stats = server.service.sampler.stats()
    body: dict[str, Any] = {"ready": stats.ready}
    if (owner := server.keys.known_owner(request)) is not None:
        body |= details(server, stats)
        body |= line_details(server, owner)
    return JSONResponse(body, 200 if stats.ready else 503)


def details(server: ServerState, stats: EngineStats) -> dict[str, Any]:
    """How the engine, capture, judge and learner are doing."""
    operations = server.operations
    next_step = operations.next_step()
    return {
        "policy_version": server.service.sampler.newest_version,
        "detail": stats.detail,
        "servers": dict(stats.servers),
        "capture": server.service.capture_status(),
        "judge": operations.judge(),
        "learner": operations.learner(),
        "practice": operations.why_no_practice() or "on",
        "runs": {
            "sampler": server.service.sampler.describe(),
            "learner": operations.where_learner_runs(),
            "judge": operations.where_judge_runs(),
        },
        "next_step": asdict(next_step) if next_step else None,
        "guard": operations.guard(),
        "queue": queue(server),
    }


def line_details(server: ServerState, owner: str) -> dict[str, Any]:
    """Where the lines stand that an owner may see; empty if there are no lines.

    What the server says of policy, learner and next step is then about the owner's own line, unless they operate it.
    """
    seen = {state.line: state for state in server.operations.line_states() if state.line in server.lines_for(owner)}
    own = seen.get(server.operations.line_of(owner))
    told: dict[str, Any] = {"lines": [asdict(state) for state in seen.values()]} if seen else {}
    if seen and not server.keys.may_operate(owner):
        shared = server.service.sampler.newest_version
        step = server.operations.next_step()
        training = step is not None and step.training
        told["policy_version"] = own.policy_version if own else shared
        samples, needed = own.samples if own else 0, next(iter(seen.values())).needed
        told["next_step"] = {
            "step": (own.step or 0) + 1 if own else 1,
            "samples": samples,
            "needed": needed,
            "training": training,
        }
        # The learner's own words name the line of somebody else.
        told["learner"] = f"{samples} of the {needed} judged turns that a step of one line needs (--batch-size)"
        if own and own.trouble:
            told["learner"] = f"suspended: {own.trouble}"
    return told


def queue(server: ServerState) -> dict[str, int] | None:
    """Turns on their way to a training step; None if turns are not recorded or the ledger cannot be read now."""
    if server.service.capture is None:
        return None
    try:
        return asdict(server.service.capture.ledger.read(groups.queue))
    except CaptureSuspended:
        return None


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    server = server_of(request)
    server.keys.check_operator(request)
    return Response(server.service.metrics.text(), media_type="text/plain; version=0.0.4")

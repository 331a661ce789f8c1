"""The model that is served. These routes need no key: clients list models before they have one."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from openclaw_rl.api.state import ServerState, server_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    entry = model_entry(server_of(request))
    pages = {"has_more": False, "first_id": entry["id"], "last_id": entry["id"]}
    return {"object": "list", "data": [entry], **pages}


@router.get("/v1/models/{name:path}")
async def one_model(name: str, request: Request) -> dict[str, Any]:
    """The model that is served, if it has this name."""
    server = server_of(request)
    server.check_model(name)
    return model_entry(server)


def model_entry(server: ServerState) -> dict[str, Any]:
    """The fields that OpenAI's clients read, then those that Anthropic's read."""
    return {
        "id": server.model,
        "object": "model",
        "created": server.started,
        "owned_by": "openclaw-rl",
        "type": "model",
        "display_name": server.model,
        "created_at": datetime.fromtimestamp(server.started, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": server.service.sampler.limits.max_context_tokens,
    }

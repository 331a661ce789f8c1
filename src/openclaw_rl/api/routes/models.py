"""The model that is served. These routes need no key: clients list models before they have one."""

from typing import Any

from fastapi import APIRouter, Request

from openclaw_rl.api.state import ServerState, server_of

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [model_entry(server_of(request))]}


@router.get("/v1/models/{name:path}")
async def one_model(name: str, request: Request) -> dict[str, Any]:
    """The model that is served, if it has this name."""
    server = server_of(request)
    server.check_model(name)
    return model_entry(server)


def model_entry(server: ServerState) -> dict[str, Any]:
    return {"id": server.model, "object": "model", "created": server.started, "owned_by": "openclaw-rl"}

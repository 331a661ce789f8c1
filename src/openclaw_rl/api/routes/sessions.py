"""Sessions: a client may say that one is over."""

from fastapi import APIRouter, Request

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.state import server_of
from openclaw_rl.ledger.errors import CaptureSuspended
from openclaw_rl.types import SessionKey

router = APIRouter()


@router.post("/v1/sessions/{name:path}/close")
async def close_session(name: str, request: Request) -> dict[str, str]:
    """End a session: its last turn will not get a next state."""
    server = server_of(request)
    owner = server.keys.owner(request)
    try:
        exists = await server.ledger().close_session(SessionKey(owner, name))
    except CaptureSuspended as error:
        raise ApiError(503, f"The session cannot be closed at the moment: {error}.") from error
    if not exists:
        raise ApiError(404, f"You have no session {name!r}.", code="unknown_session")
    return {"id": name, "status": "closed"}

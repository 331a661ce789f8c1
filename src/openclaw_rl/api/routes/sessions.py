"""Sessions: a client may say that one is over."""

from fastapi import APIRouter, Request

from openclaw_rl.api.capture.sessions import possible_names
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.state import server_of
from openclaw_rl.ledger.errors import CaptureSuspended
from openclaw_rl.types import SessionKey

router = APIRouter()


@router.post("/v1/sessions/{name:path}/close")
async def close_session(name: str, request: Request) -> dict[str, str]:
    """End a session: its last turn will not get a next state. The name may have the counter that OpenClaw adds."""
    server = server_of(request)
    owner = server.keys.owner(request)
    try:
        for id in possible_names(name):
            if await server.ledger().close_session(SessionKey(owner, id)):
                return {"id": id, "status": "closed"}
    except CaptureSuspended as error:
        raise ApiError(503, f"The session cannot be closed at the moment: {error}.") from error
    raise ApiError(404, f"You have no session {name!r}.", code="unknown_session")

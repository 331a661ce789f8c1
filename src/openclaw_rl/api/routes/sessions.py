"""Sessions: a client may say that one is over, and what it was worth."""

import contextlib

from fastapi import APIRouter, Request

from openclaw_rl.api.capture.sessions import possible_names
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wire import RewardRequest, parse
from openclaw_rl.ledger.errors import AlreadyRewarded, BadResult, CaptureSuspended, TooLate, UnknownSession
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


@router.post("/v1/sessions/{name:path}/reward", openapi_extra=body_schema(RewardRequest))
async def reward_session(name: str, request: Request) -> dict[str, str]:
    """End an episode with its reward, or with the error because of which it has none.

    The name may have the counter that OpenClaw adds.
    """
    server = server_of(request)
    owner = server.keys.owner(request)
    async with server.bodies.read(request) as content:
        body = parse(RewardRequest, content)
    try:
        for id in possible_names(name):
            with contextlib.suppress(UnknownSession):
                await server.ledger().end_episode(SessionKey(owner, id), body.result())
                return {"id": id, "status": "recorded"}
    except AlreadyRewarded as error:
        raise ApiError(409, str(error), code="already_rewarded") from error
    except TooLate as error:
        raise ApiError(409, str(error), code="too_late") from error
    except BadResult as error:
        raise ApiError(400, str(error), param=error.field) from error
    except CaptureSuspended as error:
        raise ApiError(503, f"The reward cannot be stored at the moment: {error}.") from error
    raise ApiError(404, f"You have no session {name!r}.", code="unknown_session")

"""Explicit feedback on an answer."""

from fastapi import APIRouter, Request

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wire import FeedbackRequest, parse_feedback
from openclaw_rl.ledger.errors import CannotJudge, CaptureSuspended, UnknownTurn

router = APIRouter()


@router.post("/v1/feedback", openapi_extra=body_schema(FeedbackRequest))
async def feedback(request: Request) -> dict[str, str]:
    """Rate an answer: the id of its completion, and a score or a thumb."""
    server = server_of(request)
    owner = server.keys.owner(request)
    async with server.bodies.read(request) as content:
        body = parse_feedback(content)
    try:
        await server.ledger().add_feedback(owner, body.id, body.choice, body.feedback())
    except UnknownTurn as error:
        raise ApiError(404, str(error), code="unknown_completion", param="id") from error
    except CannotJudge as error:
        raise ApiError(409, str(error), code="too_late") from error
    except CaptureSuspended as error:
        raise ApiError(503, f"Feedback cannot be stored at the moment: {error}.") from error
    return {"id": body.id, "status": "recorded"}

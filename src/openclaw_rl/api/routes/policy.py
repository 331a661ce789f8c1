"""Operations on the policy that is served."""

from fastapi import APIRouter, Request

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.operations import OperationFailed
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.wire import RollbackRequest, parse

router = APIRouter()


@router.post("/v1/policy/rollback", openapi_extra=body_schema(RollbackRequest))
async def roll_back(request: Request) -> dict[str, int]:
    """Serve an earlier policy from now on, and continue learning from it."""
    server = server_of(request)
    server.keys.check_operator(request)
    async with server.bodies.read(request) as content:
        body = parse(RollbackRequest, content or b"{}")
    try:
        return {"policy_version": await server.operations.roll_back(body.version, retrain=body.retrain)}
    except OperationFailed as error:
        raise ApiError(409, str(error), code="cannot_roll_back", param="version") from error

"""Turns for an outside trainer: it claims judged turns, and confirms those that it has trained on."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.operations import OperationFailed
from openclaw_rl.api.schema import body_schema
from openclaw_rl.api.state import server_of
from openclaw_rl.api.training_wire import ClaimRequest, ConfirmRequest
from openclaw_rl.api.wire import parse
from openclaw_rl.ledger.errors import CaptureSuspended, LeaseRefused, UnknownLease
from openclaw_rl.types import Claim

router = APIRouter()


@router.post("/v1/training/claim", openapi_extra=body_schema(ClaimRequest), response_model=None)
async def claim(request: Request) -> StreamingResponse:
    """Lease judged turns and whole groups to an outside trainer."""
    server = server_of(request)
    server.keys.check_operator(request)
    async with server.bodies.read(request) as content:
        body = parse(ClaimRequest, content or b"{}")
    try:
        wanted = (body.count, body.lease_seconds, body.wait_seconds)
        claimed = await server.operations.claim(*wanted, request.is_disconnected)
    except OperationFailed as error:
        raise ApiError(409, str(error), code="cannot_claim") from error
    except CaptureSuspended as error:
        raise ApiError(503, f"Turns cannot be claimed at the moment: {error}.") from error
    return StreamingResponse(encode(claimed), media_type="application/json")


@router.post("/v1/training/confirm", openapi_extra=body_schema(ConfirmRequest))
async def confirm(request: Request) -> dict[str, Any]:
    """Record that the turns of a lease were trained on."""
    server = server_of(request)
    server.keys.check_operator(request)
    async with server.bodies.read(request) as content:
        body = parse(ConfirmRequest, content)
    try:
        step = await server.operations.confirm(body.lease)
    except UnknownLease as error:
        raise ApiError(404, str(error), code="unknown_lease", param="lease") from error
    except LeaseRefused as error:
        raise ApiError(409, str(error), code="lease_ended", param="lease") from error
    except OperationFailed as error:
        raise ApiError(409, str(error), code="cannot_confirm") from error
    except CaptureSuspended as error:
        raise ApiError(503, f"The lease cannot be confirmed at the moment: {error}.") from error
    return {"lease": body.lease, "step": step, "policy_version": server.service.sampler.newest_version}


async def encode(claimed: Claim) -> AsyncIterator[str]:
    """The answer in pieces. Each turn is encoded by itself, because encoding holds up all other requests."""
    lease = claimed.lease
    head = {
        "lease": lease.id if lease else None,
        "expires": lease.expires if lease else None,
        "step": claimed.step,
        "waiting_for": claimed.waiting_for,
    }
    yield json.dumps(head)[:-1] + ', "groups": ['
    for number, group in enumerate(claimed.groups):
        yield ", [" if number else "["
        for place, sample in enumerate(group):
            yield (", " if place else "") + await asyncio.to_thread(json.dumps, asdict(sample))
        yield "]"
    yield "]}"

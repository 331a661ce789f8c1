"""Operations on what is learnt: an earlier policy is served again, and an outside trainer claims judged turns."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import Field

from openclaw_rl.api.errors import ApiError, refusals_of_ledger
from openclaw_rl.api.service import body_of, refusals_of_operation, server_of
from openclaw_rl.api.wire import WireModel, body_schema
from openclaw_rl.types import SHARED, Claim

router = APIRouter()

#: The most turns that one claim can ask for; only a mistake would ask for more.
MAX_CLAIMED_TURNS = 4096
#: The longest lease: a week.
MAX_LEASE_SECONDS = 604_800
#: The longest time that a claim can wait for turns: proxies close connections that are silent for longer.
MAX_CLAIM_WAIT_SECONDS = 60


class RollbackRequest(WireModel):
    """The body of POST /v1/policy/rollback: the policy version to return to, 0 for the base model.

    Without a version, the checkpoint before the current one. With `retrain`, the newest policy that was not trained on
    deleted turns: those that were are deleted, and the other turns in them are trained on again. `line` is the line of
    policies; `retrain` is about all lines.
    """

    version: Annotated[int, Field(ge=0)] | None = None
    retrain: bool = False
    line: str = SHARED


class RelearnRequest(WireModel):
    """The body of POST /v1/policy/relearn: the line of policies."""

    line: str = SHARED


class MergeRequest(WireModel):
    """The body of POST /v1/policy/merge: the folder on the server's disk with the average of all lines."""

    folder: str


class ClaimRequest(WireModel):
    """The body of POST /v1/training/claim: how many turns, for how long, and how long to wait for them."""

    count: Annotated[int, Field(ge=1, le=MAX_CLAIMED_TURNS)] | None = None
    """At least so many turns, or none; without it, --batch-size."""
    lease_seconds: Annotated[float, Field(ge=1, le=MAX_LEASE_SECONDS)] | None = None
    """Without it, --lease-seconds."""
    wait_seconds: Annotated[float, Field(ge=0, le=MAX_CLAIM_WAIT_SECONDS)] = 0.0


class ConfirmRequest(WireModel):
    """The body of POST /v1/training/confirm: the id of a lease whose turns were trained on."""

    lease: str


@router.post("/v1/policy/rollback", openapi_extra=body_schema(RollbackRequest))
async def roll_back(request: Request) -> dict[str, int]:
    """Serve an earlier policy from now on, and continue learning from it."""
    server = server_of(request)
    server.keys.check_operator(request)
    body = await body_of(request, RollbackRequest, may_be_empty=True)
    with refusals_of_operation("cannot_roll_back", "version"):
        version = await server.operations.roll_back(body.version, retrain=body.retrain, line=body.line)
    return {"policy_version": version}


@router.delete("/v1/lines/{line:path}")
async def drop_line(line: str, request: Request) -> dict[str, Any]:
    """Delete a person's line of policies for good: the shared line serves them from then on."""
    server = server_of(request)
    server.keys.check_operator(request)
    if not line:
        raise ApiError(404, "Name the line to delete: /v1/lines/NAME.", code="unknown_line")
    if line == SHARED:
        raise ApiError(409, "The shared line cannot be deleted; roll it back to version 0.", code="cannot_delete")
    with refusals_of_operation("cannot_delete"):
        return {"line": line, "deleted": await server.operations.drop_line(line)}


@router.post("/v1/policy/relearn", openapi_extra=body_schema(RelearnRequest))
async def relearn(request: Request) -> dict[str, int]:
    """Learn from the turns that the guard set aside, all the same."""
    server = server_of(request)
    server.keys.check_operator(request)
    body = await body_of(request, RelearnRequest, may_be_empty=True)
    with refusals_of_operation("cannot_relearn"):
        return {"turns": await server.operations.relearn(body.line)}


@router.post("/v1/policy/merge", openapi_extra=body_schema(MergeRequest))
async def merge(request: Request) -> dict[str, int]:
    """Let the shared line continue from what lines have in common, if it is no worse."""
    server = server_of(request)
    server.keys.check_operator(request)
    body = await body_of(request, MergeRequest)
    with refusals_of_operation("cannot_merge", "folder"):
        return {"policy_version": await server.operations.merge(Path(body.folder), request.is_disconnected)}


@router.post("/v1/training/claim", openapi_extra=body_schema(ClaimRequest), response_model=None)
async def claim(request: Request) -> StreamingResponse:
    """Lease judged turns and whole groups to an outside trainer."""
    server = server_of(request)
    server.keys.check_operator(request)
    body = await body_of(request, ClaimRequest, may_be_empty=True)
    wanted = (body.count, body.lease_seconds, body.wait_seconds)
    with refusals_of_operation("cannot_claim"), refusals_of_ledger("Turns cannot be claimed"):
        claimed = await server.operations.claim(*wanted, request.is_disconnected)
    return StreamingResponse(encode(claimed), media_type="application/json")


@router.post("/v1/training/confirm", openapi_extra=body_schema(ConfirmRequest))
async def confirm(request: Request) -> dict[str, Any]:
    """Record that the turns of a lease were trained on."""
    server = server_of(request)
    server.keys.check_operator(request)
    body = await body_of(request, ConfirmRequest)
    with refusals_of_operation("cannot_confirm"), refusals_of_ledger("The lease cannot be confirmed"):
        step = await server.operations.confirm(body.lease)
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

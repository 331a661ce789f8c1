"""Whether the server runs and is ready, and its counters."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from openclaw_rl.api.state import server_of

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the server runs."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """Whether the server can answer requests now, and how capture, judge and learner are doing."""
    server = server_of(request)
    sampler, operations = server.service.sampler, server.operations
    stats = sampler.stats()
    next_step = operations.next_step()
    body = {
        "ready": stats.ready,
        "policy_version": sampler.newest_version,
        "detail": stats.detail,
        "capture": server.service.capture_status(),
        "judge": operations.judge(),
        "learner": operations.learner(),
        "next_step": asdict(next_step) if next_step else None,
    }
    return JSONResponse(body, 200 if stats.ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Counters for Prometheus."""
    server = server_of(request)
    server.keys.owner(request)
    return Response(server.service.metrics.text(), media_type="text/plain; version=0.0.4")

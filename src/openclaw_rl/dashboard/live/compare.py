"""Compare: two policies answer the same question side by side, and a blind vote says which answer is better."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from functools import partial
from sqlite3 import Connection
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.reader import RawRequest
from openclaw_rl.api.service import OperationFailed
from openclaw_rl.api.wire import ChatRequest, parse
from openclaw_rl.dashboard.live.access import Viewer
from openclaw_rl.dashboard.live.actions import Fields, answer, number_in, read_change
from openclaw_rl.dashboard.live.dashboard import HEADERS, SIDES, Comparison, Dashboard, dashboard_of
from openclaw_rl.engines.base import VersionGone
from openclaw_rl.ledger.errors import CannotJudge, UnknownTurn
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.types import BASE_VERSION, Feedback

MAX_QUESTION_CHARACTERS = 20_000
MAX_ANSWER_TOKENS = 512
#: Checkpoints that can be chosen, the newest.
MAX_CHECKPOINTS = 30


async def page(request: Request) -> Response:
    dashboard = dashboard_of(request)

    def read(_db: Connection, _viewer: Viewer) -> dict[str, Any]:
        return {"choices": choices(dashboard), "why_not": why_not(dashboard)}

    return await dashboard.page(request, "compare", "compare", read, operator_only=True)


def why_not(dashboard: Dashboard) -> str:
    """Why policies cannot be compared on this server; empty if they can."""
    can = dashboard.server.service.sampler.capabilities
    if can.keeps_base or can.candidates:
        return ""
    return "This server's sampler holds one policy at a time, so there is nothing to compare it with."


def choices(dashboard: Dashboard) -> list[tuple[int, str]]:
    """The versions that can be asked, each with a name; the one that serves first."""
    sampler = dashboard.server.service.sampler
    newest = sampler.newest_version
    named = {newest: f"policy {newest}, which serves" if newest != BASE_VERSION else "the base model, which serves"}
    if sampler.capabilities.candidates and dashboard.run.checkpoints is not None:
        for checkpoint in reversed(dashboard.run.checkpoints.all()[-MAX_CHECKPOINTS:]):
            if not checkpoint.is_base_model and newest not in checkpoint.versions:
                words = f"policy {checkpoint.version}, checkpoint of step {checkpoint.step}"
                named.setdefault(checkpoint.version, words)
    if sampler.capabilities.keeps_base:
        named.setdefault(BASE_VERSION, "the base model")
    return list(named.items())


async def compare(request: Request) -> Response:
    """Ask both policies. The answer is a stream of JSON lines: pieces of text by side, then the comparison's name."""
    dashboard = dashboard_of(request)
    try:
        viewer, fields = await read_change(request, operator_only=True)
        versions, completions = await begin(dashboard, viewer, fields)
    except ApiError as error:
        return answer(request, error.status, error.message)
    stream = lines(dashboard, viewer, versions, completions)
    return StreamingResponse(stream, media_type="application/x-ndjson", headers={**HEADERS, "X-Accel-Buffering": "no"})


async def begin(
    dashboard: Dashboard, viewer: Viewer, fields: Fields
) -> tuple[tuple[int, int], tuple[Completion, Completion]]:
    """Start both answers, on sides that chance decides. Raises ApiError."""
    text = fields.get("text", "").strip()
    if not text or len(text) > MAX_QUESTION_CHARACTERS:
        raise ApiError(400, f"Ask something, in at most {MAX_QUESTION_CHARACTERS} characters.")
    chosen = [number_in(fields, "one"), number_in(fields, "other")]
    offered = {version for version, _ in choices(dashboard)}
    if chosen[0] == chosen[1] or not offered.issuperset(chosen):
        raise ApiError(400, "Choose two different policies from the lists.")
    secrets.SystemRandom().shuffle(chosen)
    name = secrets.token_hex(6)
    started: list[Completion] = []
    try:
        for side, version in zip(SIDES, chosen, strict=True):
            started.append(await ask(dashboard, viewer, text, version, f"compare-{name}-{side}"))
    except BaseException:
        for completion in started:
            completion.close()
        raise
    return (chosen[0], chosen[1]), (started[0], started[1])


async def ask(dashboard: Dashboard, viewer: Viewer, text: str, version: int, session: str) -> Completion:
    service = dashboard.server.service
    body = to_json({"messages": [{"role": "user", "content": text}], "max_tokens": MAX_ANSWER_TOKENS})
    raw = RawRequest(body, partial(parse, ChatRequest), viewer.owner, {"x-session-id": session})
    try:
        return (await service.begin(raw, lambda: "chatcmpl-", version))[1]
    except VersionGone:
        try:
            held = await dashboard.server.operations.hold(version)
            return (await service.begin(raw, lambda: "chatcmpl-", held))[1]
        except (OperationFailed, VersionGone) as error:
            raise ApiError(409, str(error)) from error


async def lines(
    dashboard: Dashboard, viewer: Viewer, versions: tuple[int, int], completions: tuple[Completion, Completion]
) -> AsyncIterator[bytes]:
    pieces: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()
    tasks = [
        asyncio.create_task(stream_side(side, completion, pieces))
        for side, completion in zip(SIDES, completions, strict=True)
    ]
    try:
        running = len(tasks)
        while running:
            piece = await pieces.get()
            if piece is None:
                running -= 1
                continue
            yield to_json(piece) + b"\n"
        if all(completion.choices[0].finish_reason for completion in completions):
            ids = (completions[0].id, completions[1].id)
            yield to_json({"vote": dashboard.comparisons.add(Comparison(viewer.owner, versions, ids))}) + b"\n"
    finally:
        for task in tasks:
            task.cancel()


async def stream_side(side: str, completion: Completion, pieces: "asyncio.Queue[dict[str, str] | None]") -> None:
    """Pass on the text of one answer; an error becomes a line of its own."""
    try:
        await completion.ready()
        async for update in completion:
            text = "".join(delta for delta in update.deltas if isinstance(delta, str))
            if text:
                pieces.put_nowait({"side": side, "text": text})
    except ApiError as error:
        pieces.put_nowait({"side": side, "problem": error.message})
    finally:
        completion.close()
        pieces.put_nowait(None)


async def vote(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> tuple[str, str]:
    """Record which answer is better, as explicit feedback on both, and say which policy gave which."""
    comparison = dashboard.comparisons.take(fields.get("comparison", ""), viewer.owner)
    if comparison is None:
        raise ApiError(404, "This comparison is over. Ask again.")
    better = fields.get("better", "")
    sides = zip(SIDES, comparison.versions, strict=True)
    names = " ".join(f"{side.capitalize()}: {name(version)}." for side, version in sides)
    if better not in SIDES or dashboard.ledger is None:
        return names, ""
    try:
        for side, completion in zip(SIDES, comparison.completions, strict=True):
            score = 1.0 if side == better else -1.0
            await dashboard.ledger.write(add_feedback, viewer.owner, completion, 0, Feedback(score))
    except (UnknownTurn, CannotJudge) as error:
        raise ApiError(409, f"{names} The vote was not recorded: {error}") from error
    return f"{names} Your vote is recorded.", ""


def name(version: int) -> str:
    return "the base model" if version == BASE_VERSION else f"policy {version}"

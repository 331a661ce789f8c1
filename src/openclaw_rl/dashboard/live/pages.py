"""The views that can be looked at: each reads a piece of the ledger for its viewer."""

from sqlite3 import Connection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.routes.health import details
from openclaw_rl.dashboard.components.render import ASSETS, asset, asset_url, render
from openclaw_rl.dashboard.live.access import Viewer, is_same_site
from openclaw_rl.dashboard.live.dashboard import HEADERS, Dashboard, dashboard_of, whole_number
from openclaw_rl.dashboard.live.screenshots import images
from openclaw_rl.dashboard.views.now import NowView, Tile, amount, memory_bytes, now_view, size
from openclaw_rl.dashboard.views.turn import compare_hints, from_card, token_view
from openclaw_rl.ledger import episodes
from openclaw_rl.ledger.pages import ONLY, find_session, find_turns, row_number, session_page, turn_page
from openclaw_rl.ledger.screenshot_folders import folder_name
from openclaw_rl.ledger.status import Status, read_status
from openclaw_rl.ledger.turns import load_readable
from openclaw_rl.types import PagePlace, SessionCard

SESSIONS_ON_A_PAGE, LATEST_SESSIONS = 40, 8
TURNS_ON_A_PAGE = 30
#: An asset's address changes with its content.
KEPT_FOR_GOOD = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}


async def assets(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in ASSETS or request.scope["path"] != asset_url(name):
        return Response("There is no such file.", 404, HEADERS, "text/plain")
    return Response(asset(name), headers=KEPT_FOR_GOOD, media_type=f"{ASSETS[name]}; charset=utf-8")


async def events(request: Request) -> Response:
    dashboard = dashboard_of(request)
    viewer = dashboard.access.viewer(request)
    if viewer is None:
        return Response("Log in first.", 401, HEADERS, "text/plain")
    # Another site must not use up the streams.
    if not is_same_site(request):
        return Response("This is for our own page.", 403, HEADERS, "text/plain")
    if dashboard.feed.is_full(viewer.owner):
        return Response("Too many of your pages are open.", 429, HEADERS, "text/plain")
    last = row_number(request.headers.get("last-event-id", ""))
    since = last if last is not None else whole_number(request, "since") or 0
    stream = dashboard.feed.events(viewer.owner, since, pulse="pulse" in request.query_params)
    return StreamingResponse(stream, media_type="text/event-stream", headers={**HEADERS, "X-Accel-Buffering": "no"})


async def now(request: Request) -> Response:
    dashboard = dashboard_of(request)
    ready = details(dashboard.server, dashboard.server.service.sampler.stats())

    url = str(request.base_url).rstrip("/")

    def values(status: Status, viewer: Viewer, sessions: list[SessionCard]) -> dict[str, Any]:
        view = now_of(dashboard, status, viewer)
        return {"now": view, "sessions": sessions, "outcome": episodes.outcome, "url": url}

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        return values(read_status(db, url, ready), viewer, session_page(db, viewer.owner, None, LATEST_SESSIONS))

    def without_ledger(viewer: Viewer) -> dict[str, Any]:
        return values(read_status(None, url, ready), viewer, [])

    return await dashboard.page(request, "", "now", read, without_ledger=without_ledger)


def now_of(dashboard: Dashboard, status: Status, viewer: Viewer) -> NowView:
    service = dashboard.server.service
    stats = service.sampler.stats()
    tiles = [Tile("Policy version", str(service.sampler.newest_version))]
    if viewer.is_operator:
        activity = service.metrics.recent.read()
        first = activity.first_token_seconds
        tiles = [
            Tile("Requests", str(activity.requests), "/ min"),
            Tile("First token after", *(("–", "") if first is None else (amount(round(1000 * first)), "ms"))),
            Tile("Tokens", amount(round(activity.tokens_per_second, 1)), "/ s"),
            Tile("Being answered", str(stats.active)),
            Tile("Waiting", str(stats.waiting)),
            *tiles,
            Tile("Memory", *size(memory_bytes())),
        ]
    next_step = dashboard.server.operations.next_step()
    return now_view(status, tuple(tiles), next_step, stats.detail, is_operator=viewer.is_operator)


async def sessions(request: Request) -> Response:
    dashboard = dashboard_of(request)
    only = request.query_params.get("only", "")
    only = only if only in ONLY else ""
    after = place_of(request.query_params.get("after", ""))

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        cards = session_page(db, viewer.owner, after, SESSIONS_ON_A_PAGE + 1, only)
        last = cards[SESSIONS_ON_A_PAGE - 1] if len(cards) > SESSIONS_ON_A_PAGE else None
        return {
            "sessions": cards[:SESSIONS_ON_A_PAGE],
            "older": f"{last.last!r}-{last.number}" if last else "",
            "after": after,
            "only": only,
            "outcome": episodes.outcome,
        }

    return await dashboard.page(request, "sessions", "sessions", read)


def place_of(text: str) -> PagePlace | None:
    """A place in the list of sessions, as links write it; None if it is none."""
    last, _, digits = text.rpartition("-")
    number = row_number(digits)
    try:
        return PagePlace(float(last), number) if number is not None else None
    except ValueError:
        return None


async def session(request: Request) -> Response:
    dashboard = dashboard_of(request)
    before = whole_number(request, "before")

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        card = find_session(db, viewer.owner, request.path_params["number"])
        if card is None:
            raise ApiError(404, "You have no such session. It may have been forgotten.")
        turns = turn_page(db, card.number, before, TURNS_ON_A_PAGE + 1)
        shown = turns[-TURNS_ON_A_PAGE:]
        folder = folder_name(card.key.id)
        return {
            "session": card,
            "turns": [from_card(turn) for turn in shown],
            "older": shown[0].number if len(turns) > TURNS_ON_A_PAGE else None,
            "before": before,
            "describe": episodes.describe,
            "folder": folder,
            "shots": images(dashboard.run.run_dir, folder) if viewer.is_operator else [],
        }

    return await dashboard.page(request, "sessions", "session", read)


async def tokens(request: Request) -> Response:
    """The tokens of one answer, which a page loads when somebody wants to see them."""
    dashboard = dashboard_of(request)
    number = request.path_params["number"]
    viewer = dashboard.access.viewer(request)
    if viewer is None:
        return dashboard.login_page(request)

    def make() -> str | None:
        with dashboard.threads.snapshot() as db:
            turn = load_readable(db, number) if find_turns(db, viewer.owner, [number]) else None
        if turn is None:
            return None
        method = dashboard.run.method
        view = token_view(dashboard.server.service.tokenizer, turn, method)
        overlaps = compare_hints(turn, method.topk)
        return render("dashboard/templates/tokens.html.j2", view=view, overlaps=overlaps)

    page = await dashboard.threads.run(make)
    return Response(page or "You have no such turn.", 200 if page else 404, HEADERS, "text/html")

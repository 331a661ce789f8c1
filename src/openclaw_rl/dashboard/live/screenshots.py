"""The screenshots of an episode in the browser environment, for the operator."""

from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openclaw_rl.dashboard.live.access import Viewer
from openclaw_rl.dashboard.live.dashboard import HEADERS, Dashboard, PageProblem
from openclaw_rl.dashboard.live.pages import dashboard_of
from openclaw_rl.dashboard.screenshots import images, latest_folders, read_image
from openclaw_rl.ledger import episodes
from openclaw_rl.ledger.pages import named_session
from openclaw_rl.types import SessionCard

#: Episodes whose last screenshot the list shows.
MAX_LISTED = 24


@dataclass(frozen=True, slots=True)
class EpisodeShots:
    """The screenshots of one episode."""

    folder: str
    images: list[str]
    session: SessionCard | None
    """None if it was forgotten, or belongs to another key."""


def latest_shots(dashboard: Dashboard, db: Connection, viewer: Viewer) -> list[EpisodeShots]:
    """The screenshots of the latest episodes; none for those who do not operate the server."""
    if not viewer.is_operator:
        return []
    shots = [shots_of(dashboard, db, viewer, name) for name in latest_folders(dashboard.run.run_dir, MAX_LISTED)]
    return [one for one in shots if one.images]


def shots_of(dashboard: Dashboard, db: Connection, viewer: Viewer, folder: str) -> EpisodeShots:
    return EpisodeShots(folder, images(dashboard.run.run_dir, folder), named_session(db, viewer.owner, folder))


async def page(request: Request) -> Response:
    dashboard = dashboard_of(request)

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        shots = shots_of(dashboard, db, viewer, request.path_params["folder"])
        if not shots.images:
            raise PageProblem(404, "There are no such screenshots.")
        return {"shots": shots, "outcome": episodes.outcome}

    return await dashboard.page(request, "environments", "screenshots", read, operator_only=True)


async def image(request: Request) -> Response:
    dashboard = dashboard_of(request)
    viewer = dashboard.access.viewer(request)
    if viewer is None or not viewer.is_operator:
        return Response("This is for the operator's key.", 403, HEADERS, "text/plain")
    folder, name = request.path_params["folder"], request.path_params["name"]
    content = await dashboard.threads.run(lambda: read_image(dashboard.run.run_dir, folder, name))
    if content is None:
        return Response("There is no such screenshot.", 404, HEADERS, "text/plain")
    return Response(content, headers=HEADERS, media_type="image/png")

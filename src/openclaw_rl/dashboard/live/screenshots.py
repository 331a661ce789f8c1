"""The screenshots of an episode in the browser environment, for the operator."""

import re
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openclaw_rl.api.errors import ApiError
from openclaw_rl.dashboard.live.access import Viewer
from openclaw_rl.dashboard.live.dashboard import HEADERS, Dashboard, dashboard_of
from openclaw_rl.ledger import episodes
from openclaw_rl.ledger.pages import named_session
from openclaw_rl.ledger.screenshot_folders import FOLDER
from openclaw_rl.types import SessionCard

#: What the environment names folders and images. No name leads to another folder, or is too long for one.
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_IMAGE_NAME = re.compile(r"\d+\.png")
#: Episodes whose last screenshot the list shows.
MAX_LISTED = 24


def latest_folders(run_dir: Path | None, most: int) -> list[str]:
    """The folders that changed last, at most so many."""
    if run_dir is None:
        return []
    folders = [path for path in (run_dir / FOLDER).glob("*") if _FOLDER_NAME.fullmatch(path.name)]
    return [path.name for path in sorted(folders, key=changed, reverse=True)[:most]]


def changed(path: Path) -> float:
    """When a folder last changed; 0 if it has just been removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def images(run_dir: Path | None, folder: str) -> list[str]:
    """The images in a folder, in the order they were taken; empty if there is no such folder."""
    if run_dir is None or not _FOLDER_NAME.fullmatch(folder):
        return []
    names = [path.name for path in (run_dir / FOLDER / folder).glob("*.png")]
    return sorted((name for name in names if _IMAGE_NAME.fullmatch(name)), key=lambda name: (len(name), name))


def read_image(run_dir: Path | None, folder: str, name: str) -> bytes | None:
    """An image; None if there is none of this name."""
    if run_dir is None or name not in images(run_dir, folder):
        return None
    try:
        return (run_dir / FOLDER / folder / name).read_bytes()
    except OSError:
        return None


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
            raise ApiError(404, "There are no such screenshots.")
        return {"shots": shots, "outcome": episodes.outcome}

    return await dashboard.page(request, "environments", "screenshots", read, operator_only=True)


async def image(request: Request) -> Response:
    dashboard = dashboard_of(request)
    viewer = dashboard.access.viewer(request)
    if viewer is None or not viewer.is_operator:
        return Response("This is for the operator's key.", 403, HEADERS, "text/plain")
    folder = request.path_params["folder"]
    name = request.path_params["name"]
    content = await dashboard.threads.run(lambda: read_image(dashboard.run.run_dir, folder, name))
    if content is None:
        return Response("There is no such screenshot.", 404, HEADERS, "text/plain")
    return Response(content, headers=HEADERS, media_type="image/png")

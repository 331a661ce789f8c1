"""Screenshots of the browser environment, if they are kept in the folder `screenshots` of the run."""

import re
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openclaw_rl.dashboard.live.access import Viewer
from openclaw_rl.dashboard.live.dashboard import HEADERS, Dashboard, PageProblem
from openclaw_rl.dashboard.live.pages import dashboard_of
from openclaw_rl.ledger.reader import LedgerReader

#: In the run directory; the environment makes a folder in it for each attempt.
FOLDER = "screenshots"
#: Attempts that are listed, the newest.
MAX_LISTED = 40
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_IMAGE_NAME = re.compile(r"\d+\.png")


def attempts(dashboard: Dashboard) -> list[str]:
    """The folders of the newest attempts."""
    if dashboard.run.run_dir is None:
        return []
    folders = [path for path in (dashboard.run.run_dir / FOLDER).glob("*") if _FOLDER_NAME.fullmatch(path.name)]
    return [path.name for path in sorted(folders, key=changed, reverse=True)[:MAX_LISTED]]


def changed(path: Path) -> float:
    """When a folder last changed; 0 if it has just been removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def images(dashboard: Dashboard, folder: str) -> list[str]:
    """The images of an attempt, in the order they were taken. Raises PageProblem."""
    if dashboard.run.run_dir is None or not _FOLDER_NAME.fullmatch(folder):
        raise PageProblem(404, "There are no such screenshots.")
    names = [path.name for path in (dashboard.run.run_dir / FOLDER / folder).glob("*.png")]
    if not names:
        raise PageProblem(404, "There are no such screenshots.")
    return sorted(name for name in names if _IMAGE_NAME.fullmatch(name))


async def page(request: Request) -> Response:
    dashboard, folder = dashboard_of(request), request.path_params["folder"]

    def read(_reader: LedgerReader, _viewer: Viewer) -> dict[str, Any]:
        return {"folder": folder, "images": images(dashboard, folder)}

    return await dashboard.page(request, "environments", "screenshots", read, operator_only=True)


async def image(request: Request) -> Response:
    dashboard = dashboard_of(request)
    viewer = dashboard.access.viewer(request)
    folder: str = request.path_params["folder"]
    name: str = request.path_params["name"]
    if viewer is None or not viewer.is_operator:
        return Response("This is for the operator's key.", 403, HEADERS, "text/plain")

    def load() -> bytes | None:
        try:
            if dashboard.run.run_dir is None or name not in images(dashboard, folder):
                return None
            return (dashboard.run.run_dir / FOLDER / folder / name).read_bytes()
        except (PageProblem, OSError):
            return None

    content = await dashboard.threads.run(load)
    if content is None:
        return Response("There is no such screenshot.", 404, HEADERS, "text/plain")
    return Response(content, headers=HEADERS, media_type="image/png")

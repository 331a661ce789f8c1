"""The parts of one server's live page, and what all its routes share."""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.service import ServerState
from openclaw_rl.dashboard.components.render import render
from openclaw_rl.dashboard.live.access import Access, Viewer
from openclaw_rl.dashboard.live.reads import ChangeFeed, PageThreads
from openclaw_rl.dashboard.views.learning import STYLES
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger.errors import CaptureSuspended, LedgerUnusable
from openclaw_rl.ledger.pages import cursor, row_number
from openclaw_rl.methods.base import Method
from openclaw_rl.types import Sign

SIDES = ("left", "right")
#: Comparisons that wait for a vote; older ones can no longer be voted on.
MAX_OPEN = 100
#: Scripts and styles only from this server, no frames, no requests to elsewhere.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TABS = (
    ("", "Now"),
    ("sessions", "Sessions"),
    ("notes", "Notes"),
    ("learning", "Learning"),
    ("environments", "Environments"),
    ("compare", "Compare"),
)
#: Views that show or change what concerns all users.
FOR_OPERATORS = ("learning", "compare")
PART_HEADER = "x-part"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers that wait for a vote."""

    owner: str
    versions: tuple[int, int]
    """As they were chosen, in the order of `SIDES`."""
    completions: tuple[str, str]


class Comparisons:
    """The comparisons that can be voted on."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Comparison] = OrderedDict()

    def add(self, comparison: Comparison) -> str:
        name = secrets.token_urlsafe(12)
        self._open[name] = comparison
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return name

    def take(self, name: str, owner: str) -> Comparison | None:
        """A comparison of this owner, which can then not be voted on again."""
        comparison = self._open.get(name)
        return self._open.pop(name) if comparison is not None and comparison.owner == owner else None


@dataclass(frozen=True, slots=True)
class LiveRun:
    """The run that the page is about."""

    method: Method
    run_dir: Path | None = None
    checkpoints: Checkpoints | None = None


#: Reads what a page shows, for its viewer.
ReadPage = Callable[[Connection, Viewer], dict[str, Any]]


class Dashboard:
    """One server's live page."""

    def __init__(self, server: ServerState, run: LiveRun) -> None:
        self.server = server
        self.run = run
        capture = server.service.capture
        self.ledger = capture.ledger if capture else None
        self.access = Access(server.keys)
        self.threads = PageThreads(self.ledger)
        self.feed = ChangeFeed(self.threads, self._numbers)
        self.comparisons = Comparisons()

    def close(self) -> None:
        """End the streams to open pages, so that the server can stop."""
        self.feed.close()

    def _numbers(self) -> Hashable:
        """The server's numbers that change without the ledger."""
        service = self.server.service
        stats = service.sampler.stats()
        activity = service.metrics.recent.read()
        return stats.ready, stats.active, stats.waiting, activity, service.sampler.newest_version

    def frame(self, request: Request, viewer: Viewer | None, tab: str, cursor: int | None) -> dict[str, Any]:
        """What the frame of every page needs."""
        is_part = request.headers.get(PART_HEADER) == "main"
        sees_all = viewer is not None and viewer.is_operator
        # Who has a line of their own may see what it learned.
        hidden = FOR_OPERATORS if not self.server.operations.has_lines else ("compare",)
        tabs = [tab for tab in TABS if sees_all or tab[0] not in hidden]
        return {
            "layout": f"dashboard/templates/{'part' if is_part else 'layout'}.html.j2",
            "viewer": viewer,
            "tab": tab,
            "tabs": tabs,
            "cursor": cursor,
            "serving": self.server.service.sampler.newest_version,
            "can_log_out": self.access.needs_login,
            "sign_styles": {sign: STYLES[sign] for sign in Sign},
            "signs_words": signs_words,
        }

    def login_page(self, request: Request, problem: str = "", wanted: str = "") -> Response:
        """The form that asks for a key, on the way to the page that was wanted; 401 for what a script fetches."""
        query = request.scope["query_string"].decode("latin-1")
        wanted = wanted or request.scope["path"] + (f"?{query}" if query else "")
        if request.headers.get(PART_HEADER):
            return Response("Log in first.", 401, HEADERS, "text/plain")
        values = {**self.frame(request, None, "", None), "problem": problem, "next": wanted}
        page = render("dashboard/templates/login.html.j2", **values)
        return HTMLResponse(page, 401 if problem else 200, HEADERS)

    async def page(
        self,
        request: Request,
        tab: str,
        template: str,
        read: ReadPage,
        *,
        without_ledger: Callable[[Viewer], dict[str, Any]] | None = None,
        operator_only: bool = False,
    ) -> Response:
        """A page for whoever asked: read from one moment of the ledger, rendered in a thread.

        On a server that records nothing, `without_ledger` provides what it shows.
        """
        viewer = self.access.viewer(request)
        if viewer is None:
            return self.login_page(request)
        if operator_only and not viewer.is_operator:
            return self.problem(request, viewer, 403, "This page is for the operator's key.")

        def make() -> str:
            if self.ledger is None and without_ledger is not None:
                values = {**self.frame(request, viewer, tab, 0), **without_ledger(viewer)}
                return render(f"dashboard/templates/{template}.html.j2", **values)
            with self.threads.snapshot() as db:
                values = {**self.frame(request, viewer, tab, cursor(db)), **read(db, viewer)}
            return render(f"dashboard/templates/{template}.html.j2", **values)

        try:
            return HTMLResponse(await self.threads.run(make), headers=HEADERS)
        except ApiError as error:
            return self.problem(request, viewer, error.status, error.message)
        except (LedgerUnusable, CaptureSuspended) as error:
            return self.problem(request, viewer, 503, str(error))

    def problem(self, request: Request, viewer: Viewer, status: int, message: str) -> Response:
        heading = {403: "Not for this key", 404: "Not here"}.get(status, "Not now")
        values = {**self.frame(request, viewer, "-", None), "problem": message, "heading": heading}
        return HTMLResponse(render("dashboard/templates/problem.html.j2", **values), status, HEADERS)


def dashboard_of(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


def signs_words(signs: tuple[Sign | None, ...]) -> str:
    """The verdicts of a session, for screen readers."""
    return "verdicts: " + ", ".join(str(sign) if sign else "none yet" for sign in signs) if signs else ""


def redirect(to: str) -> RedirectResponse:
    return RedirectResponse(to, 303, HEADERS)


def whole_number(request: Request, name: str) -> int | None:
    """A number in the query; None if it is missing or is none."""
    return row_number(request.query_params.get(name, ""))

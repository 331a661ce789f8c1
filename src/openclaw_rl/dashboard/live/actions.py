"""What can be done on the page: log in and out, rate an answer, forget a session, roll the policy back.

Every change is a form that carries the viewer's token. Scripts get JSON, browsers without scripts are sent back.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from openclaw_rl.api.errors import ApiError, refusals_of_ledger
from openclaw_rl.api.service import refusals_of_operation
from openclaw_rl.dashboard.live.access import Viewer, is_same_site
from openclaw_rl.dashboard.live.dashboard import HEADERS, PART_HEADER, Dashboard, dashboard_of, redirect
from openclaw_rl.learn.rollback import finish_deletions
from openclaw_rl.ledger.deletion import delete_sessions
from openclaw_rl.ledger.errors import LedgerUnusable
from openclaw_rl.ledger.pages import find_session, find_turns, row_number
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import steps_with
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.terminal import plural
from openclaw_rl.types import SHARED, Feedback

log = logging.getLogger(__name__)

#: The path in an address of one of our pages.
OWN_PATH = re.compile(r"/dashboard/[^?#]*")
#: The longest form.
MAX_FORM_BYTES = 64_000
MAX_TEXT_CHARACTERS = 4000

Fields = dict[str, str]
#: Returns a sentence about what was done, and where to go next; empty: stay.
Action = Callable[[Dashboard, Viewer, Fields], Awaitable[tuple[str, str]]]


async def read_form(request: Request) -> Fields:
    """The fields of a form, each once. Raises ApiError."""
    async with dashboard_of(request).server.bodies.read(request, MAX_FORM_BYTES) as body:
        try:
            return {name: values[0] for name, values in parse_qs(body.decode(), max_num_fields=20).items()}
        except ValueError:
            raise ApiError(400, "This is no form.") from None


async def log_in(request: Request) -> Response:
    dashboard = dashboard_of(request)
    fields = await read_form(request)
    # Only to a page of ours: anything else could lead to another site.
    target = fields.get("next", "")
    target = target if target.startswith("/dashboard/") else "/dashboard/"
    answer = redirect(target)
    if not is_same_site(request) or not dashboard.access.log_in(fields.get("key", ""), request, answer):
        return dashboard.login_page(request, "This key is not known to the server.", target)
    return answer


async def log_out(request: Request) -> Response:
    dashboard = dashboard_of(request)
    viewer = dashboard.access.viewer(request)
    fields = await read_form(request)
    answer = redirect("/dashboard/")
    if viewer is not None and dashboard.access.may_change(viewer, request, fields.get("token", "")):
        dashboard.access.log_out(request, answer)
    return answer


async def read_change(request: Request, *, operator_only: bool) -> tuple[Viewer, Fields]:
    """Whoever asks for a change, and the form. Raises ApiError, also if they may not."""
    access = dashboard_of(request).access
    viewer = access.viewer(request)
    if viewer is None:
        raise ApiError(401, "Log in first.")
    fields = await read_form(request)
    if not access.may_change(viewer, request, fields.get("token", "")):
        raise ApiError(403, "The page is out of date, or another site asked for this. Load it again.")
    if operator_only and not viewer.is_operator:
        raise ApiError(403, "This key may not do that: use the admin key.")
    return viewer, fields


def action(do: Action, *, operator_only: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """A route for a change that the page asks for."""

    async def endpoint(request: Request) -> Response:
        try:
            viewer, fields = await read_change(request, operator_only=operator_only)
            with refusals_of_ledger("This cannot be recorded"):
                message, location = await do(dashboard_of(request), viewer, fields)
        except ApiError as error:
            return answer(request, error.status, error.message)
        except LedgerUnusable as error:
            return answer(request, 503, f"This cannot be recorded at the moment: {error}.")
        return answer(request, 200, message, location)

    return endpoint


def answer(request: Request, status: int, message: str, location: str = "") -> Response:
    if request.headers.get(PART_HEADER):
        return JSONResponse({"message": message, "location": location}, status, HEADERS)
    if status >= 400:
        return Response(message, status, HEADERS, "text/plain")
    came_from = OWN_PATH.search(request.headers.get("referer", ""))
    return redirect(location or (came_from[0] if came_from else "/dashboard/"))


def number_in(fields: Fields, name: str) -> int:
    number = row_number(fields.get(name, ""))
    if number is None:
        raise ApiError(400, f"The form has no {name}.")
    return number


def ledger_of(dashboard: Dashboard) -> Ledger:
    if dashboard.ledger is None:
        raise ApiError(404, "This server records nothing (--no-capture).")
    return dashboard.ledger


async def rate(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> tuple[str, str]:
    """Explicit feedback on an answer, as POST /v1/feedback."""
    ledger = ledger_of(dashboard)
    number = number_in(fields, "turn")
    score = {"1": 1.0, "-1": -1.0}.get(fields.get("score", ""))
    if score is None:
        raise ApiError(400, "Choose a thumb.")
    cards = await dashboard.threads.read(find_turns, viewer.owner, [number])
    if not cards:
        raise ApiError(404, "You have no such turn.")
    feedback = Feedback(score, fields.get("text", "").strip()[:MAX_TEXT_CHARACTERS])
    await ledger.write(add_feedback, viewer.owner, cards[0].completion, cards[0].choice, feedback)
    return "Recorded. The judge takes it as your verdict.", ""


async def forget(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> tuple[str, str]:
    """Delete a session of the viewer for good."""
    ledger = ledger_of(dashboard)
    number = number_in(fields, "session")
    session = await dashboard.threads.read(find_session, viewer.owner, number)
    if session is None:
        raise ApiError(404, "You have no such session.")
    turns = await ledger.write(delete_sessions, [number])
    steps = await dashboard.threads.read(steps_with, turns)
    problems = await asyncio.to_thread(clean_files, ledger, dashboard)
    said = f"Forgot the session with its {plural(session.turns, 'turn', 'turns')}."
    if steps:
        named = ", ".join(map(str, steps[:8])) + (" …" if len(steps) > 8 else "")
        said += f" Training steps {named} had used them: openclaw-rl forget --retrain trains again without them."
    if problems:
        # The sentences may name sessions of others.
        said += " " + (" ".join(problems) if viewer.is_operator else "Not all of it could be removed from the files.")
    return said, "/dashboard/sessions"


def clean_files(ledger: Ledger, dashboard: Dashboard) -> list[str]:
    """Remove what was deleted from all files too; a sentence, which is logged, about each thing that stays."""
    problems: list[str] = []
    with open_ledger(ledger.folder) as db:
        finish_deletions(dashboard.run.run_dir or ledger.folder, db, problems.append, beside_server=True)
    for problem in problems:
        log.warning("%s", problem)
    return problems


async def roll_back(dashboard: Dashboard, viewer: Viewer, fields: Fields) -> tuple[str, str]:
    """Serve an earlier policy, as POST /v1/policy/rollback."""
    version = number_in(fields, "version")
    with refusals_of_operation("cannot_roll_back", "version"):
        served = await dashboard.server.operations.roll_back(version, line=fields.get("line", SHARED))
    return f"Rolled back: policy {served} serves now.", ""

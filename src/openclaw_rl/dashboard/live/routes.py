"""The addresses of the live page."""

from fastapi import FastAPI
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openclaw_rl.api.errors import ApiError
from openclaw_rl.dashboard.live import actions, compare, learning, notes, pages, screenshots
from openclaw_rl.dashboard.live.dashboard import Dashboard, LiveRun, redirect
from openclaw_rl.ledger.pages import MAX_DIGITS


class RowConvertor(IntegerConvertor):
    """A number that a row of the ledger can have. Other addresses do not exist."""

    regex = f"[0-9]{{1,{MAX_DIGITS - 1}}}"


register_url_convertor("row", RowConvertor())


async def root(request: Request) -> Response:
    """Browsers are led to the page. Programs get the error that they got before there was one."""
    if "text/html" not in request.headers.get("accept", ""):
        raise ApiError(404, "There is no GET / here; the page for people is /dashboard/.", code="unknown_url")
    return redirect("/dashboard/")


ROUTES = (
    Route("/", root),
    Route("/dashboard", root),
    Route("/dashboard/", pages.now),
    Route("/dashboard/assets/{digest}/{name}", pages.assets),
    Route("/dashboard/events", pages.events),
    Route("/dashboard/sessions", pages.sessions),
    Route("/dashboard/sessions/{number:row}", pages.session),
    Route("/dashboard/turns/{number:row}/tokens", pages.tokens),
    Route("/dashboard/notes", notes.page),
    Route("/dashboard/notes", actions.action(notes.change), methods=["POST"]),
    Route("/dashboard/correct", actions.action(notes.correct), methods=["POST"]),
    Route("/dashboard/learning", learning.learning),
    Route("/dashboard/learning/{number:row}", learning.step),
    Route("/dashboard/learning/{update:row}/again/{number:row}", learning.answer_before_and_after),
    Route("/dashboard/environments", learning.environments),
    Route("/dashboard/screenshots/{folder}", screenshots.page),
    Route("/dashboard/screenshots/{folder}/{name}", screenshots.image),
    Route("/dashboard/compare", compare.page),
    Route("/dashboard/compare", compare.compare, methods=["POST"]),
    Route("/dashboard/vote", actions.action(compare.vote, operator_only=True), methods=["POST"]),
    Route("/dashboard/login", actions.log_in, methods=["POST"]),
    Route("/dashboard/logout", actions.log_out, methods=["POST"]),
    Route("/dashboard/feedback", actions.action(actions.rate), methods=["POST"]),
    Route("/dashboard/forget", actions.action(actions.forget), methods=["POST"]),
    Route("/dashboard/rollback", actions.action(actions.roll_back, operator_only=True), methods=["POST"]),
)


def install(app: FastAPI, run: LiveRun) -> Dashboard:
    """Add the live page to a server's application."""
    dashboard = Dashboard(app.state.server, run)
    app.state.dashboard = dashboard
    app.router.routes.extend(ROUTES)
    return dashboard

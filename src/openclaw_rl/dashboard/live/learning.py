"""Learning and Environments: training steps with their batches, groups with their attempts."""

from sqlite3 import Connection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from openclaw_rl.api.errors import ApiError
from openclaw_rl.dashboard.components.render import render
from openclaw_rl.dashboard.evaluations import read_evaluations
from openclaw_rl.dashboard.live.access import Viewer, is_same_site
from openclaw_rl.dashboard.live.dashboard import HEADERS, Dashboard, dashboard_of, whole_number
from openclaw_rl.dashboard.live.screenshots import latest_shots
from openclaw_rl.dashboard.views.learning import COLUMNS, evaluation_charts, reward_charts, step_charts, step_row
from openclaw_rl.dashboard.views.turn import from_card
from openclaw_rl.engines.base import NO_TOKENS, EngineError
from openclaw_rl.lab.charts import Chart
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints, line_folder
from openclaw_rl.learn.gate import answer_greedily
from openclaw_rl.ledger import pages
from openclaw_rl.ledger.episodes import outcome
from openclaw_rl.ledger.turns import load_readable
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, SHARED, UpdateCard

STEPS_ON_A_PAGE, STEPS_IN_CHARTS = 50, 1000
GROUPS_ON_A_PAGE, EPISODES_IN_CHARTS = 20, 400
ANSWER_TOKENS = 200


async def learning(request: Request) -> Response:
    dashboard = dashboard_of(request)
    before = whole_number(request, "before")
    operations = dashboard.server.operations

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        line = shown_line(dashboard, viewer, request.query_params.get("line"))
        updates = pages.update_page(db, before, STEPS_ON_A_PAGE + 1, line)
        shown = updates[:STEPS_ON_A_PAGE]
        state = next((state for state in operations.line_states() if state.line == line), None)
        return {
            "line": line if operations.has_lines else None,
            "lines": dashboard.server.lines_for(viewer.owner),
            "state": state,
            "charts_made": learning_charts(dashboard, db, line) if before is None else [],
            "columns": COLUMNS,
            "rows": [step_row(update) for update in shown],
            "older": shown[-1].number if len(updates) > STEPS_ON_A_PAGE else None,
            "before": before,
            "checkpoints": checkpoints_of(dashboard, line),
            "serving": state.policy_version if state else dashboard.server.service.sampler.newest_version,
            "guard": operations.guard() if line == SHARED else None,
            "learns": operations.next_step() is not None or bool(updates),
        }

    return await dashboard.page(request, "learning", "learning", read, operator_only=not operations.has_lines)


def shown_line(dashboard: Dashboard, viewer: Viewer, wanted: str | None) -> str:
    """The line that a page is about: the one that was asked for, if the viewer may see it; else their own.

    An operator sees the shared line first, and everybody does who has no other.
    """
    server = dashboard.server
    if wanted in server.lines_for(viewer.owner):
        return wanted
    return SHARED if viewer.is_operator else server.operations.line_of(viewer.owner)


def learning_charts(dashboard: Dashboard, db: Connection, line: str) -> list[Chart]:
    run_dir = dashboard.run.run_dir
    evaluated = evaluation_charts(read_evaluations(run_dir and line_folder(run_dir, line)))
    return [*evaluated, *step_charts(pages.step_metrics(db, STEPS_IN_CHARTS, line))]


def checkpoints_of(dashboard: Dashboard, line: str) -> list[Checkpoint]:
    """The checkpoints of a line, the newest first."""
    run = dashboard.run
    if run.checkpoints is None or run.run_dir is None or line == SHARED:
        return run.checkpoints.all()[::-1] if run.checkpoints is not None else []
    return Checkpoints.of_run(line_folder(run.run_dir, line), run.checkpoints.keep).all()[::-1]


async def step(request: Request) -> Response:
    dashboard = dashboard_of(request)

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        update = pages.find_update(db, request.path_params["number"])
        if update is None or not may_see(dashboard, viewer, update):
            raise ApiError(404, "There is no such training step.")
        batch = pages.update_batch(db, update, viewer.owner)
        return {
            "update": update,
            "row": step_row(update),
            "columns": COLUMNS,
            "batch": batch,
            "turns": [from_card(card, with_next=True) for card in batch.cards],
            "unlisted": update.turns - batch.others - batch.deleted - len(batch.cards),
        }

    has_lines = dashboard.server.operations.has_lines
    return await dashboard.page(request, "learning", "step", read, operator_only=not has_lines)


def may_see(dashboard: Dashboard, viewer: Viewer, update: UpdateCard) -> bool:
    """Whether a step is of a line that the viewer may see."""
    return viewer.is_operator or update.line in dashboard.server.lines_for(viewer.owner)


async def answer_before_and_after(request: Request) -> Response:
    """What the policies before and after a step answer to a turn's prompt, most likely tokens only."""
    dashboard = dashboard_of(request)
    viewer = dashboard.access.viewer(request)
    if viewer is None:
        return dashboard.login_page(request)
    # Sampling costs something, so another site must not be able to ask for it.
    if not viewer.is_operator or not is_same_site(request):
        return Response("This is for the operator's key.", 403, HEADERS, "text/plain")
    number = request.path_params["number"]

    def read(db: Connection) -> tuple[list[int], int | None, int | None] | None:
        update = pages.find_update(db, request.path_params["update"])
        turn = load_readable(db, number) if pages.find_turns(db, viewer.owner, [number]) else None
        if update is None or turn is None:
            return None
        return turn.prompt_ids, pages.update_batch(db, update, viewer.owner).parent, update.version

    asked = await dashboard.threads.read(read)
    if asked is None:
        return Response("You have no such turn.", 404, HEADERS, "text/plain")
    prompt, parent, version = asked
    pairs = [(label, one) for label, one in (("before", parent), ("after", version)) if one is not None]
    sides = [(label, one, await greedy_answer(dashboard, prompt, one)) for label, one in pairs]
    return Response(render("dashboard/templates/again.html.j2", sides=sides), 200, HEADERS, "text/html")


async def greedy_answer(dashboard: Dashboard, prompt: list[int], version: int) -> str:
    service = dashboard.server.service
    if not isinstance(service.renderer, ChatRenderer):
        return f"({NO_TOKENS})"
    try:
        return await answer_greedily(service.sampler, service.renderer, prompt, version, ANSWER_TOKENS)
    except EngineError as error:
        name = "The base model" if version == BASE_VERSION else f"Policy {version}"
        return f"({name} cannot be asked: {error})"


async def environments(request: Request) -> Response:
    dashboard = dashboard_of(request)
    before = whole_number(request, "before")

    def read(db: Connection, viewer: Viewer) -> dict[str, Any]:
        groups = pages.group_page(db, viewer.owner, before, GROUPS_ON_A_PAGE + 1)
        shown = groups[:GROUPS_ON_A_PAGE]
        is_first = before is None
        points = pages.episode_points(db, viewer.owner, EPISODES_IN_CHARTS) if is_first else []
        latest = pages.session_page(db, viewer.owner, None, GROUPS_ON_A_PAGE, "episodes") if is_first else []
        return {
            "charts_made": reward_charts(points),
            "groups": shown,
            "older": shown[-1].number if len(groups) > GROUPS_ON_A_PAGE else None,
            "before": before,
            "episodes": latest,
            "outcome": outcome,
            "shots": latest_shots(dashboard, db, viewer) if is_first else [],
        }

    return await dashboard.page(request, "environments", "environments", read)

"""Assembles the HTTP application: routes, middleware and error handlers."""

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from openclaw_rl import __version__
from openclaw_rl.api import errors
from openclaw_rl.api.auth import KeyCheck, LoopbackOnly, SlowGuesses
from openclaw_rl.api.options import ApiKey
from openclaw_rl.api.reader import BodyReader
from openclaw_rl.api.routes import answers, feedback, health, notes, policy
from openclaw_rl.api.service import ChatService, Operations, ServerState

#: The topics, in the order in which an unknown path's error message lists their routes.
TOPICS = (answers, feedback, notes, policy, health)


def create_app(
    service: ChatService,
    model: str,
    *,
    aliases: Sequence[str] = (),
    keys: Sequence[ApiKey] = (),
    max_body_bytes: int = 8_000_000,
    operations: Operations | None = None,
    origins: Sequence[str] = (),
) -> FastAPI:
    """The application that serves one model, which clients may call `model` or one of `aliases`.

    Pages from `origins` may use it from a browser.
    """
    app = FastAPI(
        title="openclaw-rl",
        version=__version__,
        # Not `include_router`, which nests: `errors` compares unknown paths with a flat list of routes.
        routes=[route for topic in TOPICS for route in topic.router.routes],
        # FastAPI's documentation pages load scripts from the internet; this server makes no such requests.
        docs_url=None,
        redoc_url=None,
        # A path with a slash too many gets an error that names the right one, not a redirect without a body.
        redirect_slashes=False,
        # FastAPI's telemetry would send what it sees to wherever the environment says.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.server = ServerState(
        service=service,
        keys=KeyCheck(keys),
        operations=operations or Operations(),
        model=model,
        aliases=frozenset(aliases),
        bodies=BodyReader(max_body_bytes),
    )
    errors.install(app)
    if keys:
        app.add_middleware(SlowGuesses)
    else:
        app.add_middleware(LoopbackOnly, origins=origins)
    if origins:
        # Outermost, so that pages can read refusals too.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PATCH", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return app

"""What answers requests: the service above the policy's sampler, and the HTTP server with the API and the live page."""

import math
from pathlib import Path

import uvicorn

from openclaw_rl.api.app import create_app
from openclaw_rl.api.completion import SamplingDefaults, TokenSettings
from openclaw_rl.api.service import ChatService
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.app.config import Config
from openclaw_rl.app.connections import connection_limits, connection_type
from openclaw_rl.app.http_server import Server
from openclaw_rl.dashboard.live.dashboard import LiveRun
from openclaw_rl.dashboard.live.routes import install
from openclaw_rl.engines.base import Sampler
from openclaw_rl.engines.custom_sampler import CustomSampler
from openclaw_rl.judge.build import JudgingModel
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.models import EMBEDDED_MAX_TOKENS, EMBEDDED_TEMPERATURE

#: How long the server waits for clients to read that it stops.
GRACE_SECONDS = 2


def make_service(config: Config, policy: JudgingModel, folder: Path, ledger: Ledger | None) -> ChatService:
    own_code = config.engine.custom_generate_function_path
    return ChatService(
        CustomSampler(policy.sampler, own_code) if own_code else policy.sampler,
        policy.renderer,
        TokenSettings(
            sampling_defaults(config, folder),
            config.server.tool_parser,
            config.run.seed,
            config.learning_method.recorded_top,
        ),
        ledger=ledger,
        notes=config.notes,
    )


def sampling_defaults(config: Config, folder: Path) -> SamplingDefaults:
    """The sampling parameters of requests that do not set them."""
    embedded = SamplingDefaults(EMBEDDED_TEMPERATURE, max_tokens=EMBEDDED_MAX_TOKENS, stops_loops=True)
    if config.engine.takes_text:
        return SamplingDefaults()
    return (embedded if config.embedded else SamplingDefaults()).for_model(folder)


def make_server(config: Config, service: ChatService, loops: BackgroundLoops, sampler: Sampler) -> Server:
    """The HTTP server of the API and of the live page."""
    app = create_app(
        service,
        config.served_name,
        aliases=[config.policy_name],
        keys=config.server.api_keys,
        max_body_bytes=int(config.server.max_request_mb * 1e6),
        operations=loops,
        origins=config.server.allowed_origins,
    )
    run = LiveRun(config.learning_method, config.run.folder, config.checkpoints)
    dashboard = install(app, run) if config.server.dashboard else None
    patience = config.server.shutdown_seconds
    settings = uvicorn.Config(
        app,
        http=connection_type(connection_limits(config.server)),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(patience) + GRACE_SECONDS,
    )
    return Server(settings, sampler, patience, on_stop=dashboard.close if dashboard else None)

"""Runs a server: starts the parts, serves, and stops everything in the right order."""

import asyncio
import contextlib
import gc
import logging
import math
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn

from openclaw_rl.api.app import create_app
from openclaw_rl.api.completion import SamplingDefaults
from openclaw_rl.api.service import ChatService
from openclaw_rl.app.assembly import (
    Engines,
    answering_sampler,
    build_loops,
    build_rollout,
    start_model,
    start_other_model,
)
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.app.checks import check, check_versions, lock_folders, prepare_folders
from openclaw_rl.app.config import Config
from openclaw_rl.app.connections import connection_limits, connection_type
from openclaw_rl.app.console import banner, local_url, show_learning
from openclaw_rl.app.http_server import Server, bind, event_loop
from openclaw_rl.app.split import check_seen
from openclaw_rl.app.startup_signals import Start
from openclaw_rl.dashboard.live.dashboard import LiveRun
from openclaw_rl.dashboard.live.routes import install
from openclaw_rl.engines.base import EngineUnavailable, Sampler
from openclaw_rl.errors import UserError
from openclaw_rl.learn.rollback import finish_interrupted_deletions
from openclaw_rl.learn.samples import score_imported
from openclaw_rl.ledger import episodes, schema
from openclaw_rl.ledger.errors import CaptureSuspended
from openclaw_rl.ledger.lessons import import_run
from openclaw_rl.ledger.status import words_not_understood
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.models import EMBEDDED_MAX_TOKENS, EMBEDDED_TEMPERATURE
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.terminal import log_console, on_terminal, start_logging
from openclaw_rl.types import SHARED

log = logging.getLogger(__name__)

#: How long the server waits for clients to read that it stops.
GRACE_SECONDS = 2
#: The longest delay between a session's time-out and its end.
MAX_SWEEP_SECONDS = 30.0


def serve(config: Config, start: Start) -> None:
    """Run the server until a signal stops it. Raises KeyboardInterrupt if the signal comes before it is ready."""
    start_logging(config.run.log_level)
    check(config)
    check_seen(config)
    try:
        with contextlib.ExitStack() as stack:
            lock = lock_folders(stack, config)
            listener = stack.enter_context(contextlib.closing(bind(config.server.host, config.server.proxy_port)))
            lock.tell(local_url(config.server, listener.getsockname()[1]))
            folder = prepare_folders(config)
            take_over(config, folder)
            ledger = stack.enter_context(contextlib.closing(open_ledger(config))) if config.capture.capture else None
            runner = stack.enter_context(asyncio.Runner(loop_factory=event_loop))
            runner.run(begin(config, folder, ledger, listener, start))
    except EngineUnavailable as error:
        raise UserError(str(error)) from None
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def take_over(config: Config, folder: Path) -> None:
    """Take over what the run of --continue-from teaches. Raises UserError."""
    if config.training.continue_from is None:
        return
    source = config.training.continue_from.expanduser()
    with schema.open_ledger(config.ledger_dir, create_missing=True) as db:
        taken = import_run(db, source, ChatRenderer(folder))
    log.info("%d texts of %s are imitated, %d were taken over before.", taken.turns, source, taken.known)
    for problem in taken.errors:
        log.warning("Not taken over: %s", problem)


async def begin(config: Config, folder: Path, ledger: Ledger | None, listener: socket.socket, start: Start) -> None:
    start.enter_loop()
    await run(config, folder, ledger, listener, start.go_on)


def open_ledger(config: Config) -> Ledger:
    finish_interrupted_deletions(config.run.folder, config.ledger_dir)
    return Ledger(config.ledger_dir, config.capture.group_size, config.capture.group_timeout)


def sampling_defaults(config: Config, folder: Path) -> SamplingDefaults:
    """The sampling parameters of requests that do not set them."""
    embedded = SamplingDefaults(EMBEDDED_TEMPERATURE, max_tokens=EMBEDDED_MAX_TOKENS, stops_loops=True)
    if config.engine.takes_text:
        return SamplingDefaults()
    return (embedded if config.embedded else SamplingDefaults()).for_model(folder)


async def run(
    config: Config, folder: Path, ledger: Ledger | None, listener: socket.socket, go_on: Callable[[], None]
) -> None:
    """Start the engines, serve, and stop everything. If a signal has come, `go_on` ends the start."""
    async with contextlib.AsyncExitStack() as stack:
        engines = Engines(stack, config, folder)
        log.info("Loading %s …", config.policy_name)
        # The worker loads the weights while this process loads the tokenizer.
        policy = await start_model(stack, engines.sampler, folder)
        if config.learns:
            # A server of another project says only now what it can do.
            config.learning_method.check_sampler(engines.sampler.capabilities)
            check_versions(config, engines.sampler.capabilities)
        other = await start_other_model(stack, engines, policy)
        service = ChatService(
            answering_sampler(config, engines.sampler),
            policy.renderer,
            sampling_defaults(config, folder),
            tool_parser=config.server.tool_parser,
            seed=config.run.seed,
            ledger=ledger,
            recorded_top=config.learning_method.recorded_top,
            notes=config.notes,
        )
        loops = await build_loops(stack, engines, ledger, policy, other, service.metrics.registry)
        server = make_server(config, service, loops, engines.sampler)
        port = listener.getsockname()[1]
        unread = ledger.read(words_not_understood, quotes=False) if ledger else ""
        learner = loops.where_learner_runs()
        banner(config, engines.sampler.describe(), engines.sampler.newest_version, port, unread, learner)
        others = background_work(config, ledger, loops, engines.sampler, port, lambda: server.should_exit)
        go_on()
        loops.start(*others)
        # What has been loaded stays. The garbage collector need not look at it again, which takes a tenth of a second.
        gc.freeze()
        stack.push_async_callback(loops.stop)
        await server.serve(sockets=[listener])


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


def background_work(
    config: Config,
    ledger: Ledger | None,
    loops: BackgroundLoops,
    sampler: Sampler,
    port: int,
    is_stopping: Callable[[], bool],
) -> list[Coroutine[Any, Any, None]]:
    """The coroutines that run along with judging and learning until the server stops."""
    work = [end_idle_sessions(ledger, config.capture.session_timeout)] if ledger else []
    training = loops.lines or loops.learning or loops.outside
    if training is not None and ledger is not None:
        line = SHARED if loops.lines else None
        top = config.learning_method.recorded_top
        work.append(score_imported(ledger, sampler, config.training.batch_size, top, line=line))
        if on_terminal(stderr=True):
            work.append(show_learning(training, log_console))
    rollout = build_rollout(config)
    if rollout is not None:
        work.append(rollout.run(local_url(config.server, port) + "/v1", is_stopping))
    return work


async def end_idle_sessions(ledger: Ledger, timeout: float) -> None:
    """Close sessions that have been idle for `timeout` seconds, until the server stops."""
    while True:
        await asyncio.sleep(min(MAX_SWEEP_SECONDS, timeout / 4))
        try:
            closed = await ledger.write(episodes.close_idle, timeout)
        except CaptureSuspended:
            continue  # the ledger's writer logs when it stops and when it can write again
        if closed:
            log.debug("Closed %d idle sessions.", closed)

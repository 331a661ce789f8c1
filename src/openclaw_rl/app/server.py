"""Runs a server: starts the parts, serves, and stops everything in the right order."""

import asyncio
import contextlib
import gc
import importlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from openclaw_rl.app.assembly import Engines, start_model, start_other_model
from openclaw_rl.app.checks import check, check_versions, lock_folders, prepare_folders
from openclaw_rl.app.config import Config
from openclaw_rl.app.console import banner, local_url
from openclaw_rl.app.http_server import bind, event_loop
from openclaw_rl.app.split import check_seen
from openclaw_rl.app.startup_signals import Start
from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.errors import UserError
from openclaw_rl.learn.rollback import finish_interrupted_deletions
from openclaw_rl.ledger import schema
from openclaw_rl.ledger.lessons import import_run
from openclaw_rl.ledger.status import words_not_understood
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.terminal import start_logging

log = logging.getLogger(__name__)


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


async def run(
    config: Config, folder: Path, ledger: Ledger | None, listener: socket.socket, go_on: Callable[[], None]
) -> None:
    """Start the engines, serve, and stop everything. If a signal has come, `go_on` ends the start."""
    async with contextlib.AsyncExitStack() as stack:
        engines = Engines(stack, config, folder)
        log.info("Loading %s …", config.policy_name)
        # Importing what answers requests takes half a second, in which the worker loads the model.
        importing = asyncio.to_thread(importlib.import_module, "openclaw_rl.app.answering")
        policy, _module = await asyncio.gather(start_model(stack, engines.sampler, folder), importing)
        from openclaw_rl.app.answering import make_server, make_service
        from openclaw_rl.app.background import background_work, build_loops

        if config.learns:
            # A server of another project says only now what it can do.
            config.learning_method.check_sampler(engines.sampler.capabilities)
            check_versions(config, engines.sampler.capabilities)
        other = await start_other_model(stack, engines, policy)
        service = make_service(config, policy, folder, ledger)
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

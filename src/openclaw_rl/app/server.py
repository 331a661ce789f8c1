"""Puts the parts together and runs them: model, engine, API, signals, banner."""

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from rich.console import Console
from rich.logging import RichHandler

from openclaw_rl.api.app import create_app
from openclaw_rl.api.service import ChatService, SamplingDefaults
from openclaw_rl.app.assembly import (
    answering_sampler,
    build_loops,
    build_rollout,
    check_own_code,
    fetch,
    open_backend,
    other_model,
    start_model,
)
from openclaw_rl.app.banner import banner, local_url
from openclaw_rl.app.config import Config
from openclaw_rl.app.progress import show_learning
from openclaw_rl.app.run_options import keep_options
from openclaw_rl.app.startup_signals import Start
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import EngineUnavailable, Sampler
from openclaw_rl.engines.tinker.build import check_tinker
from openclaw_rl.errors import UserError
from openclaw_rl.judge.build import check_judges
from openclaw_rl.judge.reader import warm_up
from openclaw_rl.learn.build import check_learning, where_to_begin
from openclaw_rl.learn.imported import score_imported
from openclaw_rl.ledger.errors import CaptureSuspended
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.lock import RunDirLock, check_usable
from openclaw_rl.ledger.run_identity import keep_to_model
from openclaw_rl.models import (
    EMBEDDED_MAX_TOKENS,
    EMBEDDED_TEMPERATURE,
    can_be_fetched,
    checked,
    find_model,
    longest_context,
)
from openclaw_rl.terminal import on_terminal

log = logging.getLogger(__name__)

#: Where the log goes on a terminal, with a line below it.
console = Console(stderr=True)
#: A line of the log elsewhere: to be found again on another day, and by other programs.
PLAIN_LINE = "%(asctime)s %(levelname)-7s %(message)s"
#: After requests were told that the server stops, clients that do not read on get this long.
GRACE_SECONDS = 2
#: Sessions end at most this long after their time-out.
MAX_SWEEP_SECONDS = 30.0


def check(config: Config) -> None:
    """Everything that can be wrong before anything is loaded. Raises UserError."""
    check_tinker(config) if config.engine == "tinker" else check_local(config)
    check_judges(config)
    if config.learns:
        check_learning(config)
    if config.resume_from_ckpt not in ("auto", "none"):
        where_to_begin(config)
    check_own_code(config)
    for folder, option in own_folders(config).items():
        check_usable(folder, option)


def own_folders(config: Config) -> dict[Path, str]:
    """The folders that only one server may write to, and the options that name them; the run directory first."""
    folders = {config.run_dir.expanduser().resolve(): "--run-dir"}
    if config.capture:
        folders.setdefault(config.ledger_dir.resolve(), "--rl-buffer-dir")
    return folders


def check_local(config: Config) -> None:
    """What can be wrong with a model on this machine. Raises UserError."""
    found = find_model(config.model_name, config.cache_dir.expanduser())
    if found is not None:
        check_context(config, checked(found))
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda was asked for, but PyTorch sees no CUDA device; use --device auto.")
    if found is None and not can_be_fetched(config.model_name):
        raise ConfigError(f"There is no folder or GGUF file {config.model_name}. --model-name also takes a Hub id.")


def check_context(config: Config, folder: Path) -> None:
    """Raise ConfigError for a context that the model is not made for, before the engine would find out."""
    asked, longest = config.max_context_tokens, longest_context(folder)
    if asked is not None and longest is not None and asked > longest:
        raise ConfigError(f"--max-context-tokens {asked} is more than the model's {longest}.")


def serve(config: Config, start: Start) -> None:
    """Run the server until it is told to stop. Raises KeyboardInterrupt if that was before it was ready."""
    start_logging(config.log_level)
    check(config)
    try:
        with contextlib.ExitStack() as stack:
            lock, *_ = [
                stack.enter_context(contextlib.closing(RunDirLock(folder, option)))
                for folder, option in own_folders(config).items()
            ]
            listener = stack.enter_context(contextlib.closing(bind(config.host, config.proxy_port)))
            lock.tell(local_url(config, listener.getsockname()[1]))
            folder = model_folder(config)
            for owned in own_folders(config) if config.capture else ():
                keep_to_model(owned, config.model_label)
            keep_options(config)
            ledger = stack.enter_context(contextlib.closing(Ledger(config.ledger_dir))) if config.capture else None
            runner = stack.enter_context(asyncio.Runner(loop_factory=event_loop))
            runner.run(begin(config, folder, ledger, listener, start))
    except EngineUnavailable as error:
        raise UserError(str(error)) from None
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def begin(config: Config, folder: Path, ledger: Ledger | None, listener: socket.socket, start: Start) -> None:
    start.enter_loop()
    await run(config, folder, ledger, listener, start.go_on)


def model_folder(config: Config) -> Path:
    """The policy's model on this machine. Raises ModelNotFound, and ConfigError if it cannot be kept there."""
    try:
        return fetch(config, config.model_name)
    except OSError as error:
        raise ConfigError(
            f"The model cannot be kept in {config.cache_dir.expanduser()}: {error}. "
            "Give --cache-dir a folder that can be written to."
        ) from None


def sampling_defaults(config: Config, folder: Path) -> SamplingDefaults:
    """What a request gets that does not say otherwise."""
    embedded = SamplingDefaults(EMBEDDED_TEMPERATURE, max_tokens=EMBEDDED_MAX_TOKENS)
    return (embedded if config.embedded else SamplingDefaults()).for_model(folder)


async def run(
    config: Config, folder: Path, ledger: Ledger | None, listener: socket.socket, go_on: Callable[[], None]
) -> None:
    """Start the engines, serve, and stop everything in the right order. `go_on` is the last that may end the start."""
    async with contextlib.AsyncExitStack() as stack:
        # Patterns in ten languages are compiled while the model is loaded, not while somebody waits for an answer.
        warming = asyncio.create_task(asyncio.to_thread(warm_up)) if config.reads_feedback else None
        backend = open_backend(stack, config, folder)
        sampler = backend.sampler
        # The worker loads the weights while this process loads the tokenizer.
        policy = await start_model(stack, sampler, folder)
        other = await other_model(stack, config, backend, policy)
        answering = answering_sampler(config, sampler)
        rollout = build_rollout(config)
        service = ChatService(
            answering,
            policy.renderer,
            sampling_defaults(config, folder),
            tool_parser=config.tool_parser,
            seed=config.seed,
            ledger=ledger,
            recorded_top=config.recorded_top,
        )
        loops = await build_loops(stack, config, ledger, backend, policy, other, service.metrics.registry)
        app = create_app(
            service,
            config.model_label,
            aliases=[config.policy_name],
            keys=config.api_keys,
            max_body_bytes=int(config.max_request_mb * 1e6),
            operations=loops,
        )
        server = Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=math.ceil(config.shutdown_seconds) + GRACE_SECONDS,
            ),
            sampler,
            config.shutdown_seconds,
        )
        if warming is not None:
            await warming
        port = listener.getsockname()[1]
        banner(config, backend.describe(), sampler.newest_version, port)
        others = [end_idle_sessions(ledger, config.session_timeout)] if ledger else []
        if loops.learning is not None and ledger is not None:
            others.append(score_imported(ledger, sampler, config.recorded_top))
            if on_terminal(stderr=True):
                others.append(show_learning(loops.learning, console))
        if rollout is not None:
            others.append(rollout.run(local_url(config, port) + "/v1"))
        go_on()
        loops.start(*others)
        stack.push_async_callback(loops.stop)
        await server.serve(sockets=[listener])


async def end_idle_sessions(ledger: Ledger, timeout: float) -> None:
    """Close sessions that have been silent for too long, for as long as the server runs."""
    while True:
        await asyncio.sleep(min(MAX_SWEEP_SECONDS, timeout / 4))
        try:
            closed = await ledger.close_idle(timeout)
        except CaptureSuspended:
            continue  # the writer has said so, and will say when it can write again
        if closed:
            log.debug("%d silent sessions have ended.", closed)


class Server(uvicorn.Server):
    """A server for which Ctrl-C and SIGTERM are ordinary ends, with exit status 0.

    Requests in flight may finish for `patience` seconds, or until a second Ctrl-C; those that have not are then told
    that the server stops. A third one waits for nobody.
    """

    def __init__(self, config: uvicorn.Config, sampler: Sampler, patience: float) -> None:
        super().__init__(config)
        self.sampler, self.patience = sampler, patience
        self._hurried = asyncio.Event()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        hurry = asyncio.create_task(self._close_sampler_later())
        await super().shutdown(sockets)
        hurry.cancel()

    async def _close_sampler_later(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.patience):
                await self._hurried.wait()
        await self.sampler.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if self.should_exit and not self._hurried.is_set():
                loop.call_soon_threadsafe(self._hurried.set)
                return
            if not self.should_exit:
                log.info("Stopping: requests in flight may finish. Press Ctrl-C again to stop at once.")
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Take the address before anything slow happens."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Only a socket that listens keeps others from taking the same address.
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Stop what uses it, or choose another --proxy-port."
        ) from None
    return listener


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it exists: half the overhead of a request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def start_logging(level: str) -> None:
    """On a terminal lines are wrapped to be read; elsewhere each is one line."""
    if on_terminal(stderr=True):
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
        logging.basicConfig(level=level.upper(), format="%(message)s", datefmt="%H:%M:%S", handlers=[handler])
    else:
        logging.basicConfig(level=level.upper(), format=PLAIN_LINE, datefmt="%Y-%m-%d %H:%M:%S")
    # Every request to the Hub would be a line of its own.
    for noisy in ("httpx", "httpcore", "filelock", "uvicorn", "tinker"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))

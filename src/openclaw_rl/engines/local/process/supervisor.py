"""Keeps the sampler's worker running."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.local.process.launcher import EXIT_SECONDS, Launcher, WorkerLink
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Command,
    Failed,
    LoadPolicy,
    Ready,
    SamplerReport,
    Score,
    WorkerOptions,
)

log = logging.getLogger(__name__)

WORKER = "openclaw_rl.engines.local.process.sampler_worker"
#: If a worker dies after serving this long, its start is not to blame.
STABLE_SECONDS = 10.0
#: After more quick deaths in a row, requests are refused until a worker is ready again.
MAX_QUICK_DEATHS = 3
MAX_PAUSE_SECONDS = 30.0

DIED_WORKING = "The model's worker process stopped while it was working on this request. Please send it again."
DIED_LOADING = "The model's worker process ended while it was loading the model; the server's log may say why."
CLOSING = "The server is shutting down."


class WorkerClient(Protocol):
    """The sampler, as its supervisor needs it."""

    def first_commands(self) -> Iterable[Command]:
        """The first commands to a new worker."""

    def waits_for(self, id: int) -> bool:
        """Whether the answer to a request is still wanted."""

    def receive(self, report: SamplerReport) -> None: ...

    def lose(self, reason: str, unsent: set[int]) -> None:
        """A worker is gone, and with it every request that is not among the unsent ones."""


class WorkerEnd(NamedTuple):
    """How a worker ended."""

    reason: str
    """For its requests."""
    detail: str
    """How the process left, for the log."""
    served_seconds: float


class Supervisor:
    """One worker, started again whenever it dies.

    * Commands that come while no worker is ready are sent to the next one, unless they have been cancelled by then.
    * The client hears of every worker that died, before the next one is started.
    * The pause before a start grows with each quick death. After MAX_QUICK_DEATHS of them `failure` says why, until a
      worker is ready again.
    """

    def __init__(self, options: WorkerOptions, client: WorkerClient, launcher: Launcher) -> None:
        self.options = options
        self.client = client
        self.launcher = launcher
        self.ready: Ready | None = None
        """The ready message of the last worker that was ready."""
        self.failure = ""
        """Why requests are refused; empty if they are not."""
        self.restarts = 0
        self._link: WorkerLink | None = None
        self._backlog: list[Command] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._link is not None

    @property
    def pid(self) -> int | None:
        """The worker's process, if it runs on this machine."""
        return next(iter(self._link.pids), None) if self._link else None

    @property
    def nodes(self) -> list[str]:
        return self._link.nodes if self._link else []

    async def start(self) -> None:
        """Return when the first worker is ready. Raises EngineUnavailable if it does not get there."""
        first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._supervise(first))
        await first

    async def close(self) -> None:
        self.failure = CLOSING
        # Before the worker is gone, which may take seconds.
        self._lose_all(CLOSING)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, command: Command) -> None:
        if self._link is None:
            self._backlog.append(command)
        else:
            self._link.send(command)

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        """Start a worker, wait for its end, tell the client, and start the next."""
        quick_deaths = 0
        while True:
            end = await self._run_worker(first)
            cause = f"{end.reason} {end.detail}".rstrip()
            if not first.done():
                first.set_exception(EngineUnavailable(cause))
                return
            quick_deaths = 1 if end.served_seconds >= STABLE_SECONDS else quick_deaths + 1
            if quick_deaths > MAX_QUICK_DEATHS:
                self.failure = f"The model's worker process does not stay up: {cause}"
                self._lose_all(end.reason)
            else:
                self._lose_sent(end.reason)
            self.restarts += 1
            pause = min(MAX_PAUSE_SECONDS, 2.0 ** (quick_deaths - 2)) if quick_deaths > 1 else 0.0
            log.error("The sampler's worker ended (%s) Starting it again in %g s.", cause, pause)
            await asyncio.sleep(pause)

    async def _run_worker(self, first: asyncio.Future[None]) -> WorkerEnd:
        """One worker from its start to its end."""
        try:
            link = self.launcher.start(WORKER, self.options, self.options.device)
        except OSError as error:
            return WorkerEnd(f"The model's worker process could not be started: {error}", "", 0.0)
        # While it loads the model, it does not notice that its pipe is closed.
        reason = DIED_LOADING
        ready_at = None
        exit_seconds = 0.0
        try:
            async for report in link.reports():
                if isinstance(report, Failed):
                    reason = report.reason
                    continue
                if isinstance(report, Ready):
                    reason = DIED_WORKING
                    ready_at = time.monotonic()
                    exit_seconds = EXIT_SECONDS
                    self._connect(link, report)
                    if not first.done():
                        first.set_result(None)
                self.client.receive(report)
            exit_seconds = EXIT_SECONDS
        finally:
            self._link = None
            await link.close(exit_seconds)
        return WorkerEnd(reason, link.end, time.monotonic() - ready_at if ready_at else 0.0)

    def _connect(self, link: WorkerLink, ready: Ready) -> None:
        self.ready = ready
        self.failure = ""
        self._link = link
        # The learner computes in the precision of the first worker, so the later ones must too.
        self.options = replace(self.options, dtype=ready.dtype)
        backlog = self._backlog
        self._backlog = []
        wanted = [c for c in backlog if not isinstance(c, Add | Score) or self.client.waits_for(c.id)]
        for command in (*self.client.first_commands(), *wanted):
            link.send(command)

    def _lose_sent(self, reason: str) -> None:
        """Requests that the dead worker was not sent go to the next one."""
        self._backlog = [command for command in self._backlog if not isinstance(command, LoadPolicy)]
        self.client.lose(reason, {command.id for command in self._backlog if isinstance(command, Add | Score)})

    def _lose_all(self, reason: str) -> None:
        self._backlog.clear()
        self.client.lose(reason, set())

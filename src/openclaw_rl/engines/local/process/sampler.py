"""The local engine's sampler, as the server sees it: a worker process behind the `Sampler` protocol."""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from openclaw_rl.engines.base import (
    ConstraintRefused,
    EngineLimits,
    EngineStats,
    EngineUnavailable,
    PolicyRef,
    SamplerCapabilities,
    WeightForm,
)
from openclaw_rl.engines.local.process.launcher import EXIT_SECONDS, Launcher, ProcessLauncher, WorkerLink, on_nodes
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Cancel,
    Command,
    Failed,
    LoadPolicy,
    Packed,
    PolicyLoaded,
    Ready,
    RequestFailed,
    SamplerReport,
    Score,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.engines.serving import Admission, PolicyHolder, PolicyVersions, TokenStream, Use
from openclaw_rl.types import BASE_VERSION, SHARED, Priority, SampleRequest, ScoreRequest, Scores

log = logging.getLogger(__name__)

#: How often the worker's threads look for each other before they give up their core: for a few microseconds, about as
#: long as they need for their part of a small product.
SPINS = 2000
GAVE_WAY = "Work for idle times gave its place to the policy of somebody who waits."
NOT_PACKED = (
    "--pack-weights %s has no effect here: weights are packed only on a CPU, with --dtype %s, and not with "
    "--lora-rank 0."
)
#: The precisions from which they are packed, and what that needs.
PACKING = {
    "on": "float32 or bfloat16, where PyTorch has oneDNN, for bfloat16 also FBGEMM",
    "half": "float32, where PyTorch has FBGEMM and float16 has room for the weights",
}


class LoadedPolicy(NamedTuple):
    """Where a version is in the worker, and where it was loaded from."""

    slot: int
    """0 is the base model."""
    folder: Path


class LocalSampler(PolicyHolder[LoadedPolicy]):
    """Implements `Sampler` with one worker process.

    * A request that the worker has not answered when it dies fails with EngineUnavailable.
    * A worker that dies is started again with the same policies; requests that come meanwhile wait for it.
    * If workers keep dying, requests are refused with the reason, until one stays up.
    * A request finishes on the version on which it began: no version is replaced while it is in use.
    * A request of a line whose policy is not loaded waits for that alone.
    * Users and background work have queues of their own, so neither is refused because of the other.
    """

    def __init__(self, options: WorkerOptions, max_queue: int, launcher: Launcher | None = None) -> None:
        self.options = options
        self._admission = Admission(options.max_sequences, max_queue)
        self._versions = PolicyVersions[LoadedPolicy](options.policy_slots, load=self._load)
        self._versions.add(BASE_VERSION, LoadedPolicy(0, options.model))
        self._worker = Supervisor(options, self, launcher or ProcessLauncher(SPINS))
        self._ids = count(1)
        self._streams: dict[int, TokenStream] = {}
        self._scoring: dict[int, asyncio.Future[Scores]] = {}
        self._loading: dict[int, asyncio.Future[None]] = {}
        self._waiting: set[asyncio.Task[None]] = set()
        """Those who wait for a policy to be loaded."""
        self._active = 0
        """Sequences that the worker said it was sampling."""
        self.packed: Packed | None = None
        """The packed copy of the weights, once the worker has decided on it."""

    @property
    def capabilities(self) -> SamplerCapabilities:
        form = WeightForm.PEFT if self.options.lora_rank else WeightForm.MODEL
        return SamplerCapabilities(loads=frozenset([form]), constrains=True)

    @property
    def ready(self) -> Ready | None:
        """The worker's ready message, which it sent after loading the model."""
        return self._worker.ready

    @property
    def limits(self) -> EngineLimits:
        if self.ready is None:
            raise EngineUnavailable("The model is not loaded yet.")
        return self._admission.limits(self.ready.max_context)

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid

    @property
    def cpu_dtype(self) -> str:
        """What `--dtype auto` stands for on a CPU, as the worker has decided."""
        return self.ready.dtype if self.ready and self.ready.device == "cpu" else "float32"

    def shared_weights(self) -> bytes | None:
        """What a learner needs to use the worker's weights, while there is a worker."""
        return self.ready.shared if self.ready and self._worker.running else None

    def stats(self) -> EngineStats:
        worker = self._worker
        outstanding = self._admission.outstanding
        detail = worker.failure or ("" if worker.running else "The worker is starting.")
        # The worker reports when it steps, so after the last sequence has left its count is one step old.
        active = min(self._active, outstanding) if worker.running else 0
        return EngineStats(worker.running, active, outstanding - active, worker.restarts, detail)

    async def start(self) -> None:
        await self._worker.start()

    async def close(self) -> None:
        await self._worker.close()

    def describe(self) -> str:
        ready = self.ready
        assert ready is not None
        where = f"{ready.device}{on_nodes(self._worker.nodes)}"
        weights = f"{ready.weight_bytes / (1 << 30):.2g} GiB of weights"
        if self.packed and self.packed.bytes:
            weights += f" and {size_of(self.packed)}"
        precision = f"{ready.dtype} ({ready.dtype_reason})" if ready.dtype_reason else ready.dtype
        return f"local on {where}, {precision}, {weights}, context {ready.max_context} tokens"

    def sample(self, request: SampleRequest) -> TokenStream:
        self._check_up()
        self._admission.check(request)
        version, policy = self._versions.find(request.version, request.line)
        stream = TokenStream(self, next(self._ids), version, request.n)
        self._streams[stream.id] = stream
        self._admission.enter(stream, request.priority)
        stream.use = self._versions.use(version)
        if request.priority is Priority.IDLE:
            stream.use.give_way = partial(stream.fail, EngineUnavailable(GAVE_WAY))
        if not stream.use.waits:
            self._worker.send(Add(stream.id, request, version, policy.slot))
        else:
            waiting = asyncio.create_task(self._add_when_loaded(stream, request))
            self._waiting.add(waiting)
            waiting.add_done_callback(self._waiting.discard)
        return stream

    async def _add_when_loaded(self, stream: TokenStream, request: SampleRequest) -> None:
        """Load the policy of a request, unless another one does, and then send the request."""
        try:
            slot = (await self._versions.loaded(stream.use)).slot
        except EngineUnavailable as error:
            stream.fail(error)
            return
        if stream.id in self._streams:
            self._worker.send(Add(stream.id, request, stream.version, slot))

    async def score(self, request: ScoreRequest) -> Scores:
        self._check_up()
        self.limits.check_fits(request)
        version, _policy = self._versions.find(request.version)
        use = self._versions.use(version)
        try:
            return await self._score(request, use)
        finally:
            self._versions.release(use)

    async def _score(self, request: ScoreRequest, use: Use) -> Scores:
        id = next(self._ids)
        scores: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._scoring[id] = scores
        if request.priority is Priority.IDLE:
            # From the start: somebody may wait for the slot as soon as the policy is loaded.
            use.give_way = partial(self._fail_request, id, EngineUnavailable(GAVE_WAY))
        try:
            slot = (await self._versions.loaded(use)).slot
            if not scores.done():
                self._worker.send(Score(id, request, slot))
            return await scores
        finally:
            del self._scoring[id]
            if not scores.done() or scores.cancelled() or scores.exception():
                self.cancel(id)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False, line: str = SHARED) -> None:
        self.capabilities.check_loads(policy)
        async with self._versions.publishing(version, line):
            is_needed_now = candidate or line == SHARED
            found = LoadedPolicy(0, policy.folder)
            loaded = await self._load(version, found) if is_needed_now else found
            self._versions.add(version, loaded, candidate=candidate, line=line, loaded=is_needed_now)

    async def _load(self, version: int, policy: LoadedPolicy) -> LoadedPolicy:
        """Load a version into a slot that no other needs. One load at a time. Raises EngineUnavailable."""
        evicted = await self._versions.make_room()
        used = {loaded.slot for loaded in self._versions.held.values()}
        slot = next(slot for slot in range(1, self._versions.capacity + 1) if slot not in used)
        done = self._loading[version] = asyncio.get_running_loop().create_future()
        self._worker.send(LoadPolicy(version, slot, policy.folder))
        try:
            await done
        except EngineUnavailable:
            self._versions.restore(evicted)
            raise
        finally:
            del self._loading[version]
        return LoadedPolicy(slot, policy.folder)

    def _check_up(self) -> None:
        if self._worker.failure:
            raise EngineUnavailable(self._worker.failure)

    def forget(self, stream: TokenStream) -> None:
        """A stream ended: stop its completions that still run."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._admission.leave(stream)
        self._versions.release(stream.use)
        if stream.running:
            self.cancel(stream.id)

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions in the worker."""
        self._worker.send(Cancel(id, index))

    def first_commands(self) -> Iterator[LoadPolicy]:
        """The first commands to a new worker."""
        self._active = 0
        for version, policy in self._versions.held.items():
            yield LoadPolicy(version, policy.slot, policy.folder)

    def waits_for(self, id: int) -> bool:
        """Whether the answer to a request is still wanted."""
        return id in self._streams or id in self._scoring

    def receive(self, report: SamplerReport) -> None:
        match report:
            case Tokens(tokens, cached, scores, active, refused):
                self._active = active
                for id, result in scores.items():
                    if id in self._scoring and not self._scoring[id].done():
                        self._scoring[id].set_result(result)
                for id, count_cached in cached.items():
                    if id in self._streams:
                        self._streams[id].cached_tokens = count_cached
                for id, batch in tokens.items():
                    if id in self._streams:
                        self._streams[id].feed(batch)
                for id, reason in refused.items():
                    self._fail_request(id, ConstraintRefused(reason))
            case RequestFailed(id, reason, refused_constraint):
                self._fail_request(id, (ConstraintRefused if refused_constraint else EngineUnavailable)(reason))
            case PolicyLoaded(version, error):
                self._policy_loaded(version, error)
            case Packed():
                self._note_packed(report)

    def _note_packed(self, packed: Packed) -> None:
        self.packed = packed
        choice = self.options.pack_weights
        if packed.bytes:
            log.info("The sampler now computes with a copy of its weights: %s.", size_of(packed))
        elif choice in PACKING:
            log.warning(NOT_PACKED, choice, PACKING[choice])

    def lose(self, reason: str, unsent: set[int]) -> None:
        """A worker is gone, and with it every request that is not among the unsent ones."""
        for id in {*self._streams, *self._scoring} - unsent:
            self._fail_request(id, EngineUnavailable(reason))
        for done in self._loading.values():
            if not done.done():
                done.set_exception(EngineUnavailable(reason))

    def _fail_request(self, id: int, error: EngineUnavailable) -> None:
        if id in self._streams:
            self._streams[id].fail(error)
        if id in self._scoring and not self._scoring[id].done():
            self._scoring[id].set_exception(error)

    def _policy_loaded(self, version: int, error: str | None) -> None:
        done = self._loading.get(version)
        if done is not None and not done.done():
            done.set_exception(EngineUnavailable(error)) if error else done.set_result(None)
        elif error:
            # After a restart an adapter may be gone from the disk; the newest that is left serves.
            self._versions.retract(version)
            log.error("Policy version %d could not be loaded again: %s", version, error)


def size_of(packed: Packed) -> str:
    return f"{packed.bytes / (1 << 30):.2g} GiB packed in {packed.dtype}"


WORKER = "openclaw_rl.engines.local.process.sampler_worker"
#: If a worker dies after serving this long, its start is not to blame.
STABLE_SECONDS = 10.0

DIED_WORKING = "The model's worker process stopped while it was working on this request. Please send it again."
DIED_LOADING = "The model's worker process ended while it was loading the model; the server's log may say why."
CLOSING = "The server is shutting down."


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
    * The pause before a start grows with each quick death. After `max_quick_deaths` of them `failure` says why, until a
      worker is ready again.
    """

    def __init__(self, options: WorkerOptions, client: LocalSampler, launcher: Launcher) -> None:
        self.options = options
        self.client = client
        self.launcher = launcher
        self.max_quick_deaths = 3
        """After more quick deaths in a row, requests are refused until a worker is ready again."""
        self.max_pause = 30.0
        """The longest pause before a start, in seconds."""
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
            if quick_deaths > self.max_quick_deaths:
                self.failure = f"The model's worker process does not stay up: {cause}"
                self._lose_all(end.reason)
            else:
                self._lose_sent(end.reason)
            self.restarts += 1
            pause = min(self.max_pause, 2.0 ** (quick_deaths - 2)) if quick_deaths > 1 else 0.0
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

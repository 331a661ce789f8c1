"""The local engine's sampler, seen from the server: a worker process behind the `Sampler` protocol.

Guarantees: a request that the worker has not answered when the worker dies fails with EngineUnavailable, the worker
is started again with the same adapters, and requests that come meanwhile wait for it. If it keeps dying, requests are
refused with the reason, and it is started again ever more patiently. Users and background work have queues of their
own, so neither is refused because of the other.
"""

import asyncio
import logging
import time
from itertools import count
from typing import Any, NamedTuple

from openclaw_rl.engines.base import EngineError, EngineLimits, EngineStats, EngineUnavailable, QueueFull, VersionGone
from openclaw_rl.engines.capabilities import SamplerCapabilities
from openclaw_rl.engines.local.process.link import EXIT_SECONDS, Link
from openclaw_rl.engines.local.process.policy_slots import PolicySlots
from openclaw_rl.engines.local.process.sampler_messages import (
    Add,
    Cancel,
    Command,
    Failed,
    LoadPolicy,
    PolicyLoaded,
    Ready,
    Report,
    RequestFailed,
    Score,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.engines.policy_ref import PolicyRef, WeightForm
from openclaw_rl.engines.stream import Owner, TokenStream
from openclaw_rl.types import Priority, SampleRequest, ScoreRequest, Scores

log = logging.getLogger(__name__)

WORKER = "openclaw_rl.engines.local.process.sampler_worker"
#: A few microseconds, about as long as the other threads need for their part of a small product.
SPINS = 2000
#: A worker that lived this long did not die of how it was started.
STABLE_SECONDS = 10.0
#: After so many quick deaths in a row, requests are no longer kept waiting for the next worker.
MAX_QUICK_DEATHS = 3
#: The longest pause between two starts.
MAX_PAUSE_SECONDS = 30.0

DIED_WORKING = "The model's worker process stopped while it was working on this request. Please send it again."
DIED_LOADING = "The model's worker process ended while it was loading the model; the server's log may say why."
CLOSING = "The server is shutting down."


class Scored(NamedTuple):
    """A scoring request that somebody waits for."""

    version: int
    done: "asyncio.Future[Scores]"


class LocalStream(TokenStream):
    """A stream that knows in whose queue it stands."""

    def __init__(self, owner: Owner, id: int, version: int, request: SampleRequest) -> None:
        super().__init__(owner, id, version, request.n)
        self.priority = request.priority


class LocalSampler:
    """Implements `Sampler` with one worker process."""

    def __init__(self, options: WorkerOptions, max_queue: int) -> None:
        self.options, self.max_queue = options, max_queue
        self.ready: Ready | None = None
        self.restarts = 0
        self._policies = PolicySlots(options.policy_slots)
        self._ids = count(1)
        self._streams: dict[int, LocalStream] = {}
        self._scoring: dict[int, Scored] = {}
        self._publishing = asyncio.Lock()
        self._loading: dict[int, asyncio.Future[None]] = {}
        self._released = asyncio.Event()
        self._link: Link[Command, Report] | None = None
        self._backlog: list[Command] = []
        self._active = 0
        self._failure = ""
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> SamplerCapabilities:
        form = WeightForm.PEFT if self.options.lora_rank else WeightForm.MODEL
        return SamplerCapabilities(loads=frozenset([form]))

    @property
    def newest_version(self) -> int:
        return self._policies.newest

    @property
    def limits(self) -> EngineLimits:
        if self.ready is None:
            raise EngineUnavailable("The model is not loaded yet.")
        most = self.options.max_sequences
        return EngineLimits(self.ready.max_context, most, most + self.max_queue)

    @property
    def worker_pid(self) -> int | None:
        return self._link.process.pid if self._link else None

    def shared_weights(self) -> bytes | None:
        """What a learner needs to use the worker's weights, while there is a worker."""
        return self.ready.shared if self.ready and self._link else None

    def stats(self) -> EngineStats:
        outstanding = sum(self._outstanding(priority) for priority in Priority)
        detail = self._failure or ("" if self._link else "The worker is starting.")
        # The worker reports when it steps, so after the last sequence has left its count is one step old.
        active = min(self._active, outstanding)
        return EngineStats(self._link is not None, active, outstanding - active, self.restarts, detail)

    async def start(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(ready))
        await ready

    async def close(self) -> None:
        self._failure = CLOSING
        self._backlog.clear()
        # Before the worker is gone, which may take seconds.
        self._fail_all(CLOSING)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    def sample(self, request: SampleRequest) -> TokenStream:
        if self._failure:
            raise EngineUnavailable(self._failure)
        outstanding = self._outstanding(request.priority)
        if outstanding + request.n > self.options.max_sequences + self.max_queue:
            raise QueueFull(max(0, outstanding - self.options.max_sequences))
        version = self.newest_version if request.version is None else request.version
        slot = self._slot(version)
        stream = LocalStream(self, next(self._ids), version, request)
        self._streams[stream.id] = stream
        self._send(Add(stream.id, request, version, slot))
        return stream

    async def score(self, request: ScoreRequest) -> Scores:
        if self._failure:
            raise EngineUnavailable(self._failure)
        room = self.limits.max_context_tokens
        if len(request.ids) > room:
            raise EngineError(f"{len(request.ids)} tokens are to be scored, and the context holds {room}.")
        slot, id = self._slot(request.version), next(self._ids)
        done: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._scoring[id] = Scored(request.version, done)
        self._send(Score(id, request, slot))
        try:
            return await done
        finally:
            del self._scoring[id]
            self._released.set()
            if done.cancelled():
                self.cancel(id)

    def _slot(self, version: int) -> int:
        slot = self._policies.slot_of(version)
        if slot is None:
            raise VersionGone(f"Policy version {version} is not loaded.")
        return slot

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        self.capabilities.check_loads(policy)
        async with self._publishing:
            if version <= self._policies.latest:
                raise EngineUnavailable(f"Policy version {version} is not newer than {self._policies.latest}.")
            slot = await self._free_slot()
            before = self._policies.vacate(slot)
            done = self._loading[version] = asyncio.get_running_loop().create_future()
            self._send(LoadPolicy(version, slot, policy.folder))
            try:
                await done
            except EngineUnavailable:
                self._policies.restore(before)
                raise
            finally:
                self._loading.pop(version, None)
            self._policies.settle(version, slot, policy.folder, candidate)

    def promote(self, version: int) -> None:
        self._policies.candidates.discard(version)

    def retract(self, version: int) -> None:
        self._policies.drop(version)

    async def _free_slot(self) -> int:
        """A slot that no request is served from; waits until there is one."""
        while True:
            in_use = {stream.version for stream in self._streams.values()}
            in_use |= {scored.version for scored in self._scoring.values()}
            slot = self._policies.free_slot(in_use)
            if slot is not None:
                return slot
            self._released.clear()
            await self._released.wait()

    def _outstanding(self, priority: Priority) -> int:
        return sum(stream.running for stream in self._streams.values() if stream.priority is priority)

    def _send(self, command: Command) -> None:
        if self._link is None:
            self._backlog.append(command)
        else:
            self._link.send(command)

    def forget(self, stream: TokenStream) -> None:
        """A stream ended; stop what is still running of it."""
        if self._streams.pop(stream.id, None) is not None and stream.running:
            self.cancel(stream.id)
        self._released.set()

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions in the worker."""
        self._send(Cancel(id, index))

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        """Keep a worker running: start it, wait for its end, tell its requests, start it again."""
        quick_deaths = 0
        while True:
            reason, how, lived = await self._run_worker(first)
            told = f"{reason} {how}".rstrip()
            if not first.done():
                first.set_exception(EngineUnavailable(told))
                return
            quick_deaths = 1 if lived >= STABLE_SECONDS else quick_deaths + 1
            if quick_deaths > MAX_QUICK_DEATHS:
                self._failure = f"The model's worker process does not stay up: {told}"
                self._backlog.clear()
            self._fail_all(reason)
            self.restarts += 1
            pause = min(MAX_PAUSE_SECONDS, 2.0 ** (quick_deaths - 2)) if quick_deaths > 1 else 0.0
            log.error("The sampler's worker ended (%s) Starting it again in %g s.", told, pause)
            await asyncio.sleep(pause)

    async def _run_worker(self, first: asyncio.Future[None]) -> tuple[str, str, float]:
        """One worker from start to end: what its requests are told, how it ended, and how long it served."""
        try:
            link: Link[Command, Report] = Link(WORKER, self.options, SPINS)
        except OSError as error:
            return f"The model's worker process could not be started: {error}", "", 0.0
        # While it loads it does not hear that it should leave.
        reason, ready_at, patience = DIED_LOADING, None, 0.0
        try:
            async for report in link.reports():
                if isinstance(report, Failed):
                    reason = report.reason
                    continue
                if isinstance(report, Ready):
                    reason, ready_at, self._failure = DIED_WORKING, time.monotonic(), ""
                    patience = EXIT_SECONDS
                    self._connect(link, report)
                    if not first.done():
                        first.set_result(None)
                self._receive(report)
            patience = EXIT_SECONDS
        finally:
            self._link, self._active = None, 0
            await link.close(patience)
        return reason, link.end, time.monotonic() - ready_at if ready_at else 0.0

    def _connect(self, link: Link[Command, Report], ready: Ready) -> None:
        self.ready, self._link = ready, link
        for version, (slot, folder) in self._policies.resident.items():
            link.send(LoadPolicy(version, slot, folder))
        # What was cancelled while there was no worker never needs to start.
        alive = {*self._streams, *self._scoring}
        waiting = [c for c in self._backlog if not isinstance(c, Add | Score) or c.id in alive]
        self._backlog.clear()
        for command in waiting:
            link.send(command)

    def _receive(self, report: Report) -> None:
        match report:
            case Tokens(tokens, cached, scores, active):
                self._active = active
                for id, scored in scores.items():
                    if id in self._scoring and not self._scoring[id].done.done():
                        self._scoring[id].done.set_result(scored)
                for id, found in cached.items():
                    if id in self._streams:
                        self._streams[id].cached_tokens = found
                for id, batch in tokens.items():
                    if id in self._streams:
                        self._streams[id].feed(batch)
            case RequestFailed(id, reason):
                if id in self._streams:
                    self._streams[id].fail(EngineUnavailable(reason))
                if id in self._scoring and not self._scoring[id].done.done():
                    self._scoring[id].done.set_exception(EngineUnavailable(reason))
            case PolicyLoaded(version, error):
                self._policy_loaded(version, error)

    def _policy_loaded(self, version: int, error: str | None) -> None:
        done = self._loading.get(version)
        if done is not None and not done.done():
            done.set_exception(EngineUnavailable(error)) if error else done.set_result(None)
        elif error:
            # After a restart an adapter may be gone from the disk; the newest that is left serves.
            self._policies.drop(version)
            log.error("Policy version %d could not be loaded again: %s", version, error)

    def _fail_all(self, reason: str) -> None:
        """Tell every request that the dead worker had; those it had not been sent go to the next one."""
        self._backlog = [command for command in self._backlog if not isinstance(command, LoadPolicy)]
        unsent = {command.id for command in self._backlog if isinstance(command, Add | Score)}
        for stream in [s for s in self._streams.values() if s.id not in unsent]:
            stream.fail(EngineUnavailable(reason))
        scoring = [scored.done for id, scored in self._scoring.items() if id not in unsent]
        waiting: list[asyncio.Future[Any]] = [*self._loading.values(), *scoring]
        for done in waiting:
            if not done.done():
                done.set_exception(EngineUnavailable(reason))

"""The local engine's sampler, as the server sees it: a worker process behind the `Sampler` protocol."""

import asyncio
import logging
from collections.abc import Iterator
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
from openclaw_rl.engines.local.process.launcher import Launcher, ProcessLauncher, on_nodes
from openclaw_rl.engines.local.process.supervisor import Supervisor
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Cancel,
    LoadPolicy,
    PolicyLoaded,
    Ready,
    RequestFailed,
    SamplerReport,
    Score,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.engines.stream import Admission, TokenStream
from openclaw_rl.engines.versions import PolicyVersions
from openclaw_rl.types import BASE_VERSION, SampleRequest, ScoreRequest, Scores

log = logging.getLogger(__name__)

#: How often the worker's threads look for each other before they give up their core: for a few microseconds, about as
#: long as they need for their part of a small product.
SPINS = 2000
#: Said at the start.
NOT_PACKED = (
    "--pack-weights %s has no effect here: weights are packed only on a CPU, with --dtype float32, where PyTorch has "
    "%s, and not with --lora-rank 0."
)
#: What PyTorch must have to pack them.
PACKING = {"on": "oneDNN", "half": "FBGEMM and float16 has room for the weights"}


class LoadedPolicy(NamedTuple):
    """Where a version is in the worker, and where it was loaded from."""

    slot: int
    """0 is the base model."""
    folder: Path


class LocalSampler:
    """Implements `Sampler` with one worker process.

    * A request that the worker has not answered when it dies fails with EngineUnavailable.
    * A worker that dies is started again with the same policies; requests that come meanwhile wait for it.
    * If workers keep dying, requests are refused with the reason, until one stays up.
    * A request finishes on the version on which it began: no version is replaced while it is in use.
    * Users and background work have queues of their own, so neither is refused because of the other.
    """

    def __init__(self, options: WorkerOptions, max_queue: int, launcher: Launcher | None = None) -> None:
        self.options = options
        self._admission = Admission(options.max_sequences, max_queue)
        self._versions = PolicyVersions[LoadedPolicy](options.policy_slots)
        self._versions.add(BASE_VERSION, LoadedPolicy(0, options.model))
        self._worker = Supervisor(options, self, launcher or ProcessLauncher(SPINS))
        self._ids = count(1)
        self._streams: dict[int, TokenStream] = {}
        self._scoring: dict[int, asyncio.Future[Scores]] = {}
        self._loading: dict[int, asyncio.Future[None]] = {}
        self._active = 0
        """Sequences that the worker said it was sampling."""

    @property
    def capabilities(self) -> SamplerCapabilities:
        form = WeightForm.PEFT if self.options.lora_rank else WeightForm.MODEL
        return SamplerCapabilities(loads=frozenset([form]), constrains=True)

    @property
    def newest_version(self) -> int:
        return self._versions.newest

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
        choice = self.options.pack_weights
        if choice in PACKING and self.ready and not self.ready.packed_bytes:
            log.warning(NOT_PACKED, choice, PACKING[choice])

    async def close(self) -> None:
        await self._worker.close()

    def describe(self) -> str:
        ready = self.ready
        assert ready is not None
        where = f"{ready.device}{on_nodes(self._worker.nodes)}"
        weights = f"{ready.weight_bytes / (1 << 30):.2g} GiB of weights"
        if ready.packed_bytes:
            weights += f" and {ready.packed_bytes / (1 << 30):.2g} GiB packed in {ready.packed_dtype}"
        precision = f"{ready.dtype} ({ready.dtype_reason})" if ready.dtype_reason else ready.dtype
        return f"local on {where}, {precision}, {weights}, context {ready.max_context} tokens"

    def sample(self, request: SampleRequest) -> TokenStream:
        self._check_up()
        self._admission.check(request)
        version, policy = self._versions.find(request.version)
        stream = TokenStream(self, next(self._ids), version, request.n)
        self._streams[stream.id] = stream
        self._admission.enter(stream, request.priority)
        self._versions.use(version)
        self._worker.send(Add(stream.id, request, version, policy.slot))
        return stream

    async def score(self, request: ScoreRequest) -> Scores:
        self._check_up()
        self.limits.check_fits(request)
        version, policy = self._versions.find(request.version)
        id = next(self._ids)
        scores: asyncio.Future[Scores] = asyncio.get_running_loop().create_future()
        self._scoring[id] = scores
        self._versions.use(version)
        self._worker.send(Score(id, request, policy.slot))
        try:
            return await scores
        finally:
            del self._scoring[id]
            self._versions.release(version)
            if scores.cancelled():
                self.cancel(id)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        self.capabilities.check_loads(policy)
        async with self._versions.publishing(version):
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
            self._versions.add(version, LoadedPolicy(slot, policy.folder), candidate=candidate)

    def promote(self, version: int) -> None:
        self._versions.promote(version)

    def retract(self, version: int) -> None:
        self._versions.retract(version)

    def _check_up(self) -> None:
        if self._worker.failure:
            raise EngineUnavailable(self._worker.failure)

    def forget(self, stream: TokenStream) -> None:
        """A stream ended: stop its completions that still run."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._admission.leave(stream)
        self._versions.release(stream.version)
        if stream.running:
            self.cancel(stream.id)

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions in the worker."""
        self._worker.send(Cancel(id, index))

    def first_commands(self) -> Iterator[LoadPolicy]:
        self._active = 0
        for version, policy in self._versions.held.items():
            yield LoadPolicy(version, policy.slot, policy.folder)

    def waits_for(self, id: int) -> bool:
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

    def lose(self, reason: str, unsent: set[int]) -> None:
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

"""The sampler on Tinker: a sampling client for the base model and one for each policy version that is held.

Guarantees: a request ends on the weights it began on; a new version serves only once the service has it; whatever the
service does, a request gets its tokens or an error.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import EngineError, EngineLimits, EngineStats, EngineUnavailable, QueueFull, VersionGone
from openclaw_rl.engines.capabilities import SamplerCapabilities
from openclaw_rl.engines.policy_ref import PolicyRef, WeightForm
from openclaw_rl.engines.stream import TokenStream
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Connection
from openclaw_rl.engines.tinker.errors import CallFailed
from openclaw_rl.engines.tinker.generation import Generation
from openclaw_rl.engines.tinker.policy import Policy
from openclaw_rl.engines.tinker.policy_loader import PolicyLoader
from openclaw_rl.engines.tinker.record import BadRecord, PolicyRecord
from openclaw_rl.types import BASE_VERSION, Priority, SampleRequest, ScoreRequest, Scores

log = logging.getLogger(__name__)

#: The longest context where neither the service nor the model's files name a shorter one.
LONGEST_CONTEXT = 32768
NO_TOP_K = "This Tinker server gives no log-probs of other tokens than the given ones (top-k)."
CLOSING = "The server is shutting down."


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What a sampler needs to know beside the connection."""

    model: str
    folder: Path
    """With the model's tokenizer, and perhaps its configuration."""
    max_context: int | None
    max_sequences: int
    max_queue: int
    stream_chunk: int
    """Tokens a piece; 0: whole answers."""
    policies: int
    """Versions that are held at the same time."""


class TinkerSampler:
    """Implements `Sampler`."""

    def __init__(self, connection: Connection, options: SamplerOptions) -> None:
        self.connection, self.options = connection, options
        self.model = options.model
        """The model as the service calls it."""
        self._policy_loader = PolicyLoader(connection)
        self._policies: dict[int, Policy] = {}
        self._candidates: set[int] = set()
        self._latest = BASE_VERSION
        self._limits: EngineLimits | None = None
        self._ids = count(1)
        self._running: dict[int, tuple[TokenStream, Generation]] = {}
        self._publishing = asyncio.Lock()
        self._closed = False
        self._warned = False

    @property
    def capabilities(self) -> SamplerCapabilities:
        sample = sdk.load().SamplingClient.sample_async
        return SamplerCapabilities(
            loads=frozenset([WeightForm.REMOTE]),
            max_top_logprobs=None if sdk.takes(sample, "topk_sample_logprobs") else 0,
            scores_targets=sdk.takes(sample, "target_prompt_logprobs"),
        )

    @property
    def newest_version(self) -> int:
        return max((v for v in self._policies if v not in self._candidates), default=BASE_VERSION)

    @property
    def limits(self) -> EngineLimits:
        if self._limits is None:
            raise EngineUnavailable("There is no session with Tinker yet.")
        return self._limits

    def stats(self) -> EngineStats:
        trouble = CLOSING if self._closed else self.connection.sampling_trouble
        outstanding = sum(self._outstanding(priority) for priority in Priority)
        return EngineStats(self._limits is not None and not trouble, outstanding, 0, 0, trouble)

    async def start(self) -> None:
        await self.connection.open()
        self.model = self.connection.find_model(self.options.model)

        async def base() -> Any:
            return await self.connection.service.create_sampling_client_async(base_model=self.model)

        policy = Policy(self.connection, base)
        try:
            await policy.open()
        except CallFailed as error:
            raise error.as_unavailable() from error
        self._policies[BASE_VERSION] = policy
        most = self.options.max_sequences
        self._limits = EngineLimits(self._context(), most, most + self.options.max_queue)

    def _context(self) -> int:
        named = (self.connection.models.get(self.model), own_context(self.options.folder), LONGEST_CONTEXT)
        allowed = min(limit for limit in named if limit)
        return min(allowed, self.options.max_context or allowed)

    async def close(self) -> None:
        self._closed = True
        for stream, generation in list(self._running.values()):
            stream.fail(EngineUnavailable(CLOSING))
            generation.cancel()

    def sample(self, request: SampleRequest) -> TokenStream:
        policy = self._open_policy(request.version)
        outstanding, most = self._outstanding(request.priority), self.options.max_sequences
        if outstanding + request.n > most + self.options.max_queue:
            raise QueueFull(max(0, outstanding - most))
        version = self.newest_version if request.version is None else request.version
        stream = TokenStream(self, next(self._ids), version, request.n)
        # Nobody watches background work, so it is not cut into pieces.
        chunk = self.options.stream_chunk if request.priority is Priority.USER else 0
        generation = Generation(policy, request, chunk, stream)
        self._running[stream.id] = (stream, generation)
        generation.start(lambda: self._ended(stream))
        return stream

    async def score(self, request: ScoreRequest) -> Scores:
        room = self.limits.max_context_tokens
        if len(request.ids) > room:
            raise EngineError(f"{len(request.ids)} tokens are to be scored, and the context holds {room}.")
        try:
            scores = await self._open_policy(request.version).score(request)
        except CallFailed as error:
            raise error.as_engine() from error
        if request.top_k and scores.top is None and not self._warned:
            self._warned = True
            log.warning(NO_TOP_K)
        return scores

    async def publish(self, version: int, ref: PolicyRef, *, candidate: bool = False) -> None:
        self.capabilities.check_loads(ref)
        async with self._publishing:
            if version <= self._latest:
                raise EngineUnavailable(f"Policy version {version} is not newer than {self._latest}.")
            policy = await self._load(ref.folder)
            if candidate:
                self._candidates.add(version)
            self._policies[version], self._latest = policy, version
            self._forget_oldest()

    def promote(self, version: int) -> None:
        self._candidates.discard(version)

    def retract(self, version: int) -> None:
        self._policies.pop(version, None)
        self._candidates.discard(version)

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions; a stream's wish."""
        if id in self._running:
            generation = self._running[id][1]
            generation.cancel() if index is None else generation.drop(index)

    def forget(self, stream: TokenStream) -> None:
        if stream.id in self._running and stream.running:
            self._running[stream.id][1].cancel()

    def _ended(self, stream: TokenStream) -> None:
        self._running.pop(stream.id, None)

    def _open_policy(self, version: int | None) -> Policy:
        if self._closed:
            raise EngineUnavailable(CLOSING)
        wanted = self.newest_version if version is None else version
        if wanted not in self._policies:
            raise VersionGone(f"Policy version {wanted} is not loaded.")
        return self._policies[wanted]

    async def _load(self, folder: Path) -> Policy:
        try:
            record = PolicyRecord.read(folder)
        except BadRecord as error:
            raise EngineUnavailable(f"{error}: give another --resume-from-ckpt, or none to begin anew.") from error
        if record.base_model != self.model:
            raise EngineUnavailable(
                f"{folder} was learned from {record.base_model}, and {self.model} is served: give --model-name "
                f"{record.base_model}, or begin anew with --resume-from-ckpt none."
            )
        policy = Policy(self.connection, lambda: self._policy_loader.open(record))
        try:
            await policy.open()
        except CallFailed as error:
            raise error.as_unavailable() from error
        return policy

    def _forget_oldest(self) -> None:
        """Requests in flight hold on to their weights themselves."""
        own = sorted(version for version in self._policies if version != BASE_VERSION)
        for version in own[: -self.options.policies]:
            if version != self.newest_version:
                del self._policies[version]

    def _outstanding(self, priority: Priority) -> int:
        """Users and background work have queues of their own."""
        running = self._running.values()
        return sum(stream.running for stream, generation in running if generation.request.priority is priority)


def own_context(folder: Path) -> int | None:
    """The longest context that a model's files name, if they do."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

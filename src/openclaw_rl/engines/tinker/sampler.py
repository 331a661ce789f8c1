"""The sampler on Tinker: a sampling client for the base model and one for each policy version that is held."""

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import (
    EngineLimits,
    EngineStats,
    EngineUnavailable,
    PolicyRef,
    SamplerCapabilities,
    WeightForm,
)
from openclaw_rl.engines.stream import Admission, TokenStream
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Connection
from openclaw_rl.engines.tinker.errors import CallFailed
from openclaw_rl.engines.tinker.generation import Generation
from openclaw_rl.engines.tinker.policy import RemotePolicy
from openclaw_rl.engines.tinker.policy_loader import PolicyLoader
from openclaw_rl.engines.tinker.record import BadRecord, PolicyRecord
from openclaw_rl.engines.versions import PolicyVersions
from openclaw_rl.http_client import url_without_account
from openclaw_rl.types import BASE_VERSION, Priority, SampleRequest, ScoreRequest, Scores

log = logging.getLogger(__name__)

#: The longest context, unless the service or the model's files name a shorter one.
LONGEST_CONTEXT = 32768
NO_TOP_K = "This Tinker server gives no log-probs of other tokens than the given ones (top-k)."
CLOSING = "The server is shutting down."
#: What a server costs that always samples from the newest weights, for the banner.
ONLY_NEWEST = "it samples from the newest weights only, so an answer may begin on one version and end on the next"


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The settings of a sampler, beside its connection."""

    model: str
    folder: Path
    """Holds the model's tokenizer, and perhaps its configuration."""
    max_context: int | None
    max_sequences: int
    max_queue: int
    stream_chunk: int
    """Tokens per piece of a streamed answer; 0: whole answers."""
    policies: int
    """Versions that are held at the same time."""


class TinkerSampler:
    """Implements `Sampler`.

    * A request finishes on the weights on which it began, also when its version is evicted.
    * A new version serves only once the service has it.
    * A request always gets its tokens or an error.
    * Log-probs are raw: where the service's are not, the tokens are scored again.
    * Users and background work have queues of their own, so neither is refused because of the other.
    """

    def __init__(self, connection: Connection, options: SamplerOptions) -> None:
        self.connection, self.options = connection, options
        self.model = options.model
        """The model as the service calls it."""
        self._policy_loader = PolicyLoader(connection)
        self._admission = Admission(options.max_sequences, options.max_queue)
        self._versions = PolicyVersions[RemotePolicy](options.policies)
        self._limits: EngineLimits | None = None
        self._ids = count(1)
        self._generations: dict[int, Generation] = {}
        self._closed = False
        self._warned_of_top_k = False

    @property
    def capabilities(self) -> SamplerCapabilities:
        pins = self.connection.traits.pins_versions
        return replace(sampler_capabilities(), candidates=pins, keeps_base=pins)

    @property
    def newest_version(self) -> int:
        return self._versions.newest

    @property
    def limits(self) -> EngineLimits:
        if self._limits is None:
            raise EngineUnavailable("There is no session with Tinker yet.")
        return self._limits

    def stats(self) -> EngineStats:
        trouble = CLOSING if self._closed else self.connection.sampling_trouble
        ready = self._limits is not None and not trouble
        # The service does not say which sequences wait.
        return EngineStats(ready, self._admission.outstanding, 0, 0, trouble)

    async def start(self) -> None:
        await self.connection.open()
        self.model = self.connection.find_model(self.options.model)

        async def base() -> Any:
            return await self.connection.service.create_sampling_client_async(base_model=self.model)

        self._versions.add(BASE_VERSION, await self._open(base))
        self._limits = self._admission.limits(self._context())

    def _context(self) -> int:
        named = (self.connection.models.get(self.model), configured_context(self.options.folder), LONGEST_CONTEXT)
        allowed = min(limit for limit in named if limit)
        return min(allowed, self.options.max_context or allowed)

    async def close(self) -> None:
        self._closed = True
        for generation in list(self._generations.values()):
            generation.stream.fail(EngineUnavailable(CLOSING))
            generation.cancel()

    def describe(self) -> str:
        traits = self.connection.traits
        where = url_without_account(self.connection.account.base_url or "in the cloud")
        newest = "" if traits.pins_versions else f"; {ONLY_NEWEST}"
        return f"{traits.name} at {where}, context {self.limits.max_context_tokens} tokens{newest}"

    def sample(self, request: SampleRequest) -> TokenStream:
        version, policy = self._find(request.version)
        self._admission.check(request)
        stream = TokenStream(self, next(self._ids), version, request.n)
        # Background work is not streamed, so it is not cut into pieces.
        chunk = self.options.stream_chunk if request.priority is Priority.USER else 0
        generation = self._generations[stream.id] = Generation(policy, request, chunk, stream)
        self._admission.enter(stream, request.priority)
        generation.start(lambda: self._ended(stream))
        return stream

    async def score(self, request: ScoreRequest) -> Scores:
        self.limits.check_fits(request)
        _, policy = self._find(request.version)
        try:
            scores = await policy.score(request)
        except CallFailed as error:
            raise error.as_engine() from error
        if request.top_k and scores.top is None and not self._warned_of_top_k:
            self._warned_of_top_k = True
            log.warning(NO_TOP_K)
        return scores

    async def publish(self, version: int, ref: PolicyRef, *, candidate: bool = False) -> None:
        self.capabilities.check_loads(ref)
        async with self._versions.publishing(version):
            policy = await self._load(ref.folder)
            self._versions.evict()
            self._versions.add(version, policy, candidate=candidate)

    def promote(self, version: int) -> None:
        self._versions.promote(version)

    def retract(self, version: int) -> None:
        self._versions.retract(version)

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions."""
        if id in self._generations:
            generation = self._generations[id]
            generation.cancel() if index is None else generation.drop(index)

    def forget(self, stream: TokenStream) -> None:
        """A stream ended: stop its completions that still run."""
        if stream.running:
            self.cancel(stream.id)

    def _ended(self, stream: TokenStream) -> None:
        del self._generations[stream.id]
        self._admission.leave(stream)

    def _find(self, version: int | None) -> tuple[int, RemotePolicy]:
        if self._closed:
            raise EngineUnavailable(CLOSING)
        return self._versions.find(version)

    async def _load(self, folder: Path) -> RemotePolicy:
        try:
            record = PolicyRecord.read(folder)
        except BadRecord as error:
            raise EngineUnavailable(
                f"{error}: give another --resume-from-ckpt, or none to start from the base model."
            ) from error
        if record.base_model != self.model:
            raise EngineUnavailable(
                f"{folder} was learned from {record.base_model}, and {self.model} is served: give --model-name "
                f"{record.base_model}, or start from the base model with --resume-from-ckpt none."
            )
        return await self._open(lambda: self._policy_loader.open(record))

    async def _open(self, make_client: Callable[[], Awaitable[Any]]) -> RemotePolicy:
        policy = RemotePolicy(self.connection, make_client)
        try:
            await policy.open()
        except CallFailed as error:
            raise error.as_unavailable() from error
        return policy


def configured_context(folder: Path) -> int | None:
    """The longest context that a model's files name, or None."""
    try:
        config = json.loads((folder / "config.json").read_text())
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def sampler_capabilities() -> SamplerCapabilities:
    """What the installed SDK lets a sampler record and score."""
    sample = sdk.load().SamplingClient.sample_async
    return SamplerCapabilities(
        loads=frozenset([WeightForm.REMOTE]),
        max_top_logprobs=None if sdk.takes(sample, "topk_sample_logprobs") else 0,
        scores_targets=sdk.takes(sample, "target_prompt_logprobs"),
        advice="pip install -U tinker may give more",
    )

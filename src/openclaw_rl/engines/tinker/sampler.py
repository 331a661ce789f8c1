"""The sampler on Tinker: a sampling client for the base model and one for each policy version that is held.

The service returns only whole samples. Completions are sampled in pieces of a few tokens, each continuing from the
exact ids before it. That makes streaming possible, and a completion that is dropped (a stop string was seen, the client
left) is not sampled to its end. The first piece of all completions is one call, so that the prompt is read once.
"""

import asyncio
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
from openclaw_rl.engines.serving import Admission, PolicyHolder, PolicyVersions, TokenStream, Use
from openclaw_rl.engines.tinker import sdk
from openclaw_rl.engines.tinker.connection import Connection
from openclaw_rl.engines.tinker.remote_policy import Drawn, PolicyLoader, RemotePolicy
from openclaw_rl.engines.tinker.sdk import CallFailed
from openclaw_rl.engines.tinker.training_run import BadRecord, PolicyRecord
from openclaw_rl.http_client import url_without_account
from openclaw_rl.types import (
    BASE_VERSION,
    SHARED,
    FinishReason,
    Priority,
    SampledToken,
    SampleRequest,
    ScoreRequest,
    Scores,
)

log = logging.getLogger(__name__)
#: The longest context, unless the service or the model's files name a shorter one.
LONGEST_CONTEXT = 32768
NO_TOP_K = "This Tinker server gives no log-probs of other tokens than the given ones (top-k)."
CLOSING = "The server is shutting down."
NO_LINES = (
    "--policy-per-user needs a server that keeps apart all policies that are sampled from, and {} does not: leave it "
    "out, or use Tinker's service or --backend local."
)
#: What a server costs that always samples from the newest weights, for the banner.
ONLY_NEWEST = "it samples from the newest weights only, so an answer may begin on one version and end on the next"


class Generation:
    """Feeds a stream until all its completions are finished or dropped."""

    def __init__(
        self,
        policy: RemotePolicy,
        load: Callable[[Use], Awaitable[RemotePolicy]],
        request: SampleRequest,
        chunk: int,
        stream: TokenStream,
    ) -> None:
        """`load` opens the policy, if it is not. `chunk`: tokens per piece; 0: everything at once."""
        self.policy = policy
        self._load = load
        self.request = request
        self.stream = stream
        self.chunk = chunk or request.params.max_tokens
        self._written: dict[int, list[int]] = {index: [] for index in range(request.n)}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, done: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)
        self._task.add_done_callback(lambda _task: done())

    def drop(self, index: int) -> None:
        self._written.pop(index, None)
        if index in self._tasks:
            self._tasks[index].cancel()
        if not self._written:
            self.cancel()

    def cancel(self) -> None:
        self._written.clear()
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """If sampling failed, the stream must fail too: nothing will feed it."""
        if not task.cancelled() and (error := task.exception()):
            if not isinstance(error, EngineUnavailable):
                error = EngineUnavailable(f"The answer could not be sampled: {error!r}.")
            self.stream.fail(error)

    async def _run(self) -> None:
        try:
            if self.stream.use.waits:
                self.policy = await self._load(self.stream.use)
            drawn = await self._draw(list(self.request.prompt_ids), self.request.n, "first", 0)
            for index, piece in enumerate(drawn):
                self._take(index, piece)
            self._tasks = {index: asyncio.create_task(self._continue(index)) for index in self._written}
            if self._tasks:
                done, _ = await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
                for task in done:
                    # A completion that was dropped was cancelled; the others are not affected.
                    if not task.cancelled():
                        task.result()
        except CallFailed as error:
            self.stream.fail(error.as_unavailable())
        finally:
            for task in self._tasks.values():
                task.cancel()

    async def _continue(self, index: int) -> None:
        while index in self._written:
            ids = self._written[index]
            prompt = [*self.request.prompt_ids, *ids]
            (piece,) = await self._draw(prompt, 1, f"{index}.{len(ids)}", len(ids))
            self._take(index, piece)

    async def _draw(self, prompt: list[int], n: int, place: str, written: int) -> list[Drawn]:
        tokens = min(self.chunk, self.request.params.max_tokens - written)
        return await self.policy.draw(prompt, self.request.params, n, tokens, place)

    def _take(self, index: int, piece: Drawn) -> None:
        """Feed a piece to the stream; the last token of the last piece gets the finish."""
        if index not in self._written:
            return
        written = self._written[index]
        short = len(piece.ids) < min(self.chunk, self.request.params.max_tokens - len(written))
        written += piece.ids
        finish: FinishReason | None = None
        if piece.stopped:
            finish = FinishReason.STOP
        elif len(written) >= self.request.params.max_tokens or short:
            # A piece that is shorter than asked for and did not stop has reached the end of the service's context.
            finish = FinishReason.LENGTH
        if finish is not None:
            del self._written[index]
        last = len(piece.ids) - 1
        self.stream.feed(
            [
                SampledToken(
                    index,
                    id,
                    piece.logprobs[place],
                    piece.top[place] if piece.top else (),
                    finish if place == last else None,
                )
                for place, id in enumerate(piece.ids)
            ]
        )


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """The settings of a sampler, without its connection."""

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
    lines: bool = False
    """Whether it serves several lines."""


class TinkerSampler(PolicyHolder[RemotePolicy]):
    """Implements `Sampler`, for one line or for several.

    * A request finishes on the version on which it began: no version is evicted while it is in use.
    * A request of a line whose policy is not loaded waits for that alone.
    * A new version serves only once the service has it.
    * A request always gets its tokens or an error.
    * Log-probs are raw: where the service's are not, the tokens are scored again.
    * Users and background work have queues of their own, so neither is refused because of the other.
    """

    def __init__(self, connection: Connection, options: SamplerOptions) -> None:
        self.connection = connection
        self.options = options
        self.model = options.model
        """The model as the service calls it."""
        self._policy_loader = PolicyLoader(connection)
        self._admission = Admission(options.max_sequences, options.max_queue)
        self._versions = PolicyVersions[RemotePolicy](options.policies, RemotePolicy.close, self._load)
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
        if self.options.lines and not self.connection.traits.serves_lines:
            raise EngineUnavailable(NO_LINES.format(self.connection.traits.name))
        self.model = self.connection.find_model(self.options.model)

        async def make_base() -> Any:
            return await self.connection.service.create_sampling_client_async(base_model=self.model)

        base = RemotePolicy(self.connection, make_base)
        await self._open(base)
        self._versions.add(BASE_VERSION, base)
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
        version, policy = self._find(request.version, request.line)
        self._admission.check(request)
        stream = TokenStream(self, next(self._ids), version, request.n)
        stream.use = self._versions.use(version)
        # Background work is not streamed, so it is not cut into pieces.
        chunk = self.options.stream_chunk if request.priority is Priority.USER else 0
        generation = Generation(policy, self._versions.loaded, request, chunk, stream)
        self._generations[stream.id] = generation
        self._admission.enter(stream, request.priority)
        generation.start(lambda: self._ended(stream))
        return stream

    async def score(self, request: ScoreRequest) -> Scores:
        self.limits.check_fits(request)
        version, _policy = self._find(request.version)
        use = self._versions.use(version)
        try:
            scores = await (await self._versions.loaded(use)).score(request)
        except CallFailed as error:
            raise error.as_engine() from error
        finally:
            self._versions.release(use)
        if request.top_k and scores.top is None and not self._warned_of_top_k:
            self._warned_of_top_k = True
            log.warning(NO_TOP_K)
        return scores

    async def publish(self, version: int, ref: PolicyRef, *, candidate: bool = False, line: str = SHARED) -> None:
        self.capabilities.check_loads(ref)
        async with self._versions.publishing(version, line):
            policy = self._read(ref.folder)
            is_needed_now = candidate or line == SHARED
            if is_needed_now:
                await self._load(version, policy)
            self._versions.add(version, policy, candidate=candidate, line=line, loaded=is_needed_now)

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
        self._versions.release(stream.use)

    def _find(self, version: int | None, line: str = SHARED) -> tuple[int, RemotePolicy]:
        if self._closed:
            raise EngineUnavailable(CLOSING)
        return self._versions.find(version, line)

    def _read(self, folder: Path) -> RemotePolicy:
        """The policy of a folder, not open yet. Raises EngineUnavailable."""
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
        return RemotePolicy(self.connection, lambda: self._policy_loader.open(record))

    async def _load(self, version: int, policy: RemotePolicy) -> RemotePolicy:
        """Open a policy in the place of one that may go. One at a time. Raises EngineUnavailable."""
        evicted = await self._versions.make_room()
        try:
            await self._open(policy)
        except EngineUnavailable:
            self._versions.restore(evicted)
            raise
        for old in evicted.values():
            old.close()
        return policy

    async def _open(self, policy: RemotePolicy) -> None:
        try:
            await policy.open()
        except CallFailed as error:
            raise error.as_unavailable() from error


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

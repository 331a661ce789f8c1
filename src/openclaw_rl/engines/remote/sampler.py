"""The sampler whose tokens come from servers of another project, and what it finds out about each at its start."""

import asyncio
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from openclaw_rl.aio import gather_or_cancel
from openclaw_rl.engines.base import (
    ConstraintRefused,
    EngineError,
    EngineLimits,
    EngineStats,
    EngineUnavailable,
    PolicyRef,
    SamplerCapabilities,
    VersionGone,
    WeightForm,
)
from openclaw_rl.engines.remote.constrained import ConstrainedCompletions
from openclaw_rl.engines.remote.dialect import Dialect, ServerTraits
from openclaw_rl.engines.remote.http import InferenceServer, RequestRefused
from openclaw_rl.engines.remote.process import ServerProcess
from openclaw_rl.engines.remote.replica import Replica, ReplicaTimes, Router
from openclaw_rl.engines.serving import Admission, PolicyHolder, PolicyVersions, TokenStream
from openclaw_rl.types import BASE_VERSION, SHARED, SampleRequest, SamplingParams, ScoreRequest, Scores

log = logging.getLogger(__name__)

#: How often a request that waits for a server asks whether one is still to be expected.
RECHECK_SECONDS = 0.5
#: In the folder of policies: the adapter that stands for the base model.
BASE_FOLDER = ".base"
CLOSING = "The server is shutting down."


class ServedPolicy(NamedTuple):
    """A version as the servers know it. The base model has no folder, unless something stands for it."""

    name: str
    folder: Path | None


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """The settings of a sampler, without its servers."""

    model: Path
    max_context: int | None
    max_sequences: int
    max_queue: int
    policies: int
    """Versions that are held at the same time."""
    lora_rank: int
    policies_folder: Path
    """Where the learner writes policies, which the servers must be able to read."""
    learns: bool = True
    times: ReplicaTimes = field(default_factory=ReplicaTimes)


class RemoteSampler(PolicyHolder[ServedPolicy]):
    """Implements `Sampler` over one or several servers of one kind, which hold the same policy versions.

    * A request finishes on the version on which it began: a version is unloaded only when nobody uses it.
    * A new version serves only once every server that is up has loaded it.
    * When a server dies, its requests fail with EngineUnavailable. Requests that come while a server of our own is
      being started wait for it. If there is no server to wait for, they are refused at once.
    * A request always gets its tokens or an error, whatever a server answers.
    * A version that cannot be loaded leaves the others as they were.
    * Policies are adapters; `FullWeightSampler` is for those that are whole models.
    * Each completion is a request of its own, so that it can be dropped alone. Servers share the prefix between them.
    """

    def __init__(
        self, dialect: Dialect, servers: Sequence[tuple[InferenceServer, ServerProcess | None]], options: RemoteOptions
    ) -> None:
        self.dialect = dialect
        self.options = options
        self._versions = PolicyVersions[ServedPolicy](options.policies, self._unload_soon, self._load_when_up)
        # Servers key their cached prefixes by an adapter's name, so a name must never stand for two policies, also not
        # after this program was started again.
        self._prefix = f"openclaw-{secrets.token_hex(4)}"
        self.replicas = [
            Replica(dialect, server, process, self._folders, self._give_up, options.times)
            for server, process in servers
        ]
        self._router = Router(self.replicas)
        self._constrained = ConstrainedCompletions(options.model)
        self._admission = Admission(options.max_sequences, options.max_queue)
        self._ids = count(1)
        self._tasks: dict[int, dict[int, asyncio.Task[None]]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def traits(self) -> ServerTraits:
        """What the servers have in common. Raises EngineUnavailable before the start."""
        known = [replica.traits for replica in self.replicas if replica.traits is not None]
        if not known:
            raise EngineUnavailable(f"The {self.dialect.name} server is not up yet.")
        return ServerTraits(
            known[0].product,
            known[0].base_model,
            min(traits.max_context for traits in known),
            min((most for traits in known if (most := traits.max_top_logprobs) is not None), default=None),
            all(traits.scores_targets for traits in known),
            all(traits.prioritises for traits in known),
            all(traits.mixes_base for traits in known),
            all(traits.replaces_tied_head for traits in known),
        )

    @property
    def capabilities(self) -> SamplerCapabilities:
        traits = self.traits
        return SamplerCapabilities(
            loads=frozenset([WeightForm.PEFT]),
            max_top_logprobs=traits.max_top_logprobs,
            scores_targets=traits.scores_targets,
            constrains=True,
            advice=f"a {self.dialect.name} server can be started with other arguments",
        )

    @property
    def limits(self) -> EngineLimits:
        allowed = self.traits.max_context
        return self._admission.limits(min(allowed, self.options.max_context or allowed))

    def describe(self) -> str:
        where = ", ".join(replica.server.url for replica in self.replicas)
        return f"{self.traits.product} at {where}, context {self.limits.max_context_tokens} tokens"

    def stats(self) -> EngineStats:
        up = [replica for replica in self.replicas if replica.up]
        away = [replica for replica in self.replicas if not replica.up]
        detail = CLOSING if self._closed else " ".join(f"{r.server.url} is not up: {r.trouble}" for r in away)
        outstanding = self._admission.outstanding
        active = min(outstanding, self.options.max_sequences) if up else 0
        restarts = sum(replica.restarts for replica in self.replicas)
        servers = {replica.server.url: replica.running if replica.up else None for replica in self.replicas}
        return EngineStats(bool(up) and not self._closed, active, outstanding - active, restarts, detail, servers)

    async def start(self) -> None:
        try:
            await self._start()
        except RequestRefused as error:
            answer = str(error).rstrip(".")
            raise EngineUnavailable(
                f"{answer}. This is not how {self.dialect.name} answers: look at the URL and the server's version."
            ) from error

    async def _start(self) -> None:
        await gather_or_cancel([replica.start() for replica in self.replicas])
        for replica in self.replicas:
            await check_raw(self.dialect, replica)
        self._constrained.prepare()
        await self._prepare_policies()

    async def _prepare_policies(self) -> None:
        """Find out whether policies can be loaded, and hold the base model."""
        options = self.options
        for replica in self.replicas:
            await unload_leftovers(self.dialect, replica, options.policies_folder.parent)
            if options.learns:
                name = f"{self._prefix}-probe"
                await check_adapters(
                    self.dialect, replica, name, options.model, options.policies_folder, options.lora_rank
                )
        self._versions.add(BASE_VERSION, await self._base())

    async def _base(self) -> ServedPolicy:
        """The base model, or the adapter that stands for it."""
        if not self.traits.mixes_base and self.options.learns:
            folder = self.options.policies_folder / BASE_FOLDER
            write_zero_adapter(self.options.model, folder, rank=1)
            base = ServedPolicy(f"{self._prefix}-base", folder.resolve())
            await self._load(base, folder)
            return base
        return ServedPolicy(self.traits.base_model, None)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        await asyncio.gather(*self._background, return_exceptions=True)
        self._constrained.close()

    def sample(self, request: SampleRequest) -> TokenStream:
        self._check_up()
        self._admission.check(request)
        stream = TokenStream(self, next(self._ids), self._version_for(request), request.n)
        self._admission.enter(stream, request.priority)
        self._begin(stream, request)
        return stream

    def _version_for(self, request: SampleRequest) -> int:
        """The version that will answer a request. Raises VersionGone."""
        return self._versions.find(request.version, request.line)[0]

    def _begin(self, stream: TokenStream, request: SampleRequest) -> None:
        """Send the completions of a request that nobody has dropped yet. From here on it keeps its version."""
        stream.version, policy = self._versions.find(request.version, request.line)
        stream.use = self._versions.use(stream.version)
        self._tasks[stream.id] = {
            index: asyncio.create_task(self._complete(stream, policy, request, index))
            for index in range(request.n)
            if stream.is_open(index)
        }

    async def score(self, request: ScoreRequest) -> Scores:
        self._check_up()
        self.limits.check_fits(request)
        version, policy = self._versions.find(request.version)
        use = self._versions.use(version)
        try:
            policy = await self._versions.loaded(use) if use.waits else policy
            replica = await self._replica(request.ids, policy)
            async with replica.working() as traits:
                model = self._model(policy, traits)
                scores, weights = await self.dialect.score(replica.server, traits, model, request)
                self._check_weights(replica, policy, weights)
                return scores
        finally:
            self._versions.release(use)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False, line: str = SHARED) -> None:
        self.capabilities.check_loads(policy)
        async with self._versions.publishing(version, line):
            adapter = self._named(version, policy)
            is_needed_now = candidate or line == SHARED
            if is_needed_now:
                await self._load_version(version, adapter)
            self._versions.add(version, adapter, candidate=candidate, line=line, loaded=is_needed_now)

    async def _load_version(self, version: int, adapter: ServedPolicy) -> ServedPolicy:
        """Load a version in the place of one that may go. One load at a time. Raises EngineUnavailable."""
        assert adapter.folder is not None
        evicted = await self._versions.make_room()
        try:
            await self._load(adapter, adapter.folder)
        except EngineError as error:
            self._versions.restore(evicted)
            await self._unload(adapter)
            raise EngineUnavailable(f"Policy version {version} could not be loaded: {error}") from error
        for old in evicted.values():
            await self._unload(old)
        return adapter

    async def _load_when_up(self, version: int, adapter: ServedPolicy) -> ServedPolicy:
        """The same for requests, which wait while a server of our own is being started."""
        while not any(replica.up for replica in self.replicas):
            await self._wait_for_server()
        return await self._load_version(version, adapter)

    def _named(self, version: int, policy: PolicyRef) -> ServedPolicy:
        return ServedPolicy(f"{self._prefix}-v{version}", policy.folder)

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions."""
        for number, task in self._tasks.get(id, {}).items():
            if index in (None, number):
                task.cancel()

    def forget(self, stream: TokenStream) -> None:
        """Stop the completions of a stream that ended. Those with all tokens read on, which keeps their connection."""
        if stream.id not in self._tasks:
            return
        for index, task in self._tasks.pop(stream.id).items():
            if stream.is_open(index):
                task.cancel()
            else:
                self._keep_until_done(task)
        self._admission.leave(stream)
        self._versions.release(stream.use)

    def _folders(self) -> Mapping[str, Path]:
        return {held.name: held.folder for held in self._versions.all.values() if held.folder is not None}

    def _give_up(self, name: str, error: EngineError) -> None:
        """Hold a version no longer that a server could not load again."""
        for version, policy in self._versions.held.items():
            if policy.name == name:
                log.error("Policy version %d is given up: a server could not load it again: %s", version, error)
                self.retract(version)

    def _check_up(self) -> None:
        if self._closed:
            raise EngineUnavailable(CLOSING)
        if not any(replica.up or replica.comes_back for replica in self.replicas):
            raise EngineUnavailable(self.stats().detail)

    def _model(self, policy: ServedPolicy, traits: ServerTraits) -> str:
        """The name by which requests ask for a policy."""
        return policy.name

    async def _complete(self, stream: TokenStream, policy: ServedPolicy, request: SampleRequest, index: int) -> None:
        """Feed one completion to its stream."""
        constrained = None
        try:
            policy = await self._versions.loaded(stream.use) if stream.use.waits else policy
            constrained = await self._constrained.follow(request)
            replica = await self._replica(request.prompt_ids, policy)
            async with replica.working() as traits:
                model = self._model(policy, traits)
                async for piece in self.dialect.sample(replica.server, traits, model, request, index):
                    self._check_weights(replica, policy, piece.weights, stream)
                    if piece.cached_tokens is not None:
                        stream.cached_tokens = piece.cached_tokens
                    stream.feed(await asyncio.to_thread(constrained.add, piece) if constrained else piece.tokens)
                if constrained and constrained.held:
                    answer = await self.dialect.score(replica.server, traits, model, constrained.scoring())
                    self._check_weights(replica, policy, answer.weights, stream)
                    stream.feed(constrained.scored(answer))
            if stream.is_open(index):
                raise EngineUnavailable("The inference server ended its answer without a last token.")
        except EngineUnavailable as error:
            stream.fail(error)
        except EngineError as error:
            is_about_schema = constrained and not constrained.held and isinstance(error, RequestRefused)
            stream.fail((ConstraintRefused if is_about_schema else EngineUnavailable)(str(error)))

    def _check_weights(
        self, replica: Replica, policy: ServedPolicy, weights: Sequence[str], stream: TokenStream | None = None
    ) -> None:
        """Raise EngineUnavailable if other weights than the policy's computed an answer, which `stream` is to get."""

    async def _replica(self, ids: Sequence[int], policy: ServedPolicy) -> Replica:
        """The server for a request; waits while a server of our own is being started."""
        while (replica := self._router.choose(ids, policy.name)) is None:
            await self._wait_for_server()
        if policy.folder is not None and not replica.holds(policy.name):
            raise VersionGone("The policy version of this request was replaced while it waited for a server.")
        return replica

    async def _wait_for_server(self) -> None:
        """Wait a while, or until a server is up. Raises EngineUnavailable if there is none to wait for."""
        self._check_up()
        waiting = [asyncio.create_task(each.wait_until_up()) for each in self.replicas]
        try:
            await asyncio.wait(waiting, timeout=RECHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def _load(self, adapter: ServedPolicy, folder: Path) -> None:
        """Load a version on every server that is up. Those that are not catch up when they come back."""
        if not any(replica.up for replica in self.replicas):
            raise EngineUnavailable(self.stats().detail)
        # One may come up meanwhile.
        while missing := [replica for replica in self.replicas if replica.up and not replica.holds(adapter.name)]:
            # Each load is waited for: a server must not be left in the middle of one.
            loads = (replica.load(adapter.name, folder) for replica in missing)
            for error in await asyncio.gather(*loads, return_exceptions=True):
                if isinstance(error, BaseException):
                    raise error

    def _unload_soon(self, adapter: ServedPolicy) -> None:
        self._keep_until_done(asyncio.create_task(self._unload(adapter)))

    def _keep_until_done(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _unload(self, adapter: ServedPolicy) -> None:
        await gather_or_cancel([replica.unload(adapter.name) for replica in self.replicas if replica.up])


#: Log-probs at this temperature differ from raw ones by far more than two computations of the same number do.
TEMPERATURE = 0.3
MAX_LOGPROB_ERROR = 0.05
PROMPT = [1, 2, 3, 4]
#: Where vLLM and SGLang list the base model and the loaded adapters with their folders.
MODELS = "/v1/models"


async def check_raw(dialect: Dialect, replica: Replica) -> None:
    """Raise EngineUnavailable unless the log-probs of samples are those of the raw distribution."""
    assert replica.traits is not None
    server = replica.server
    traits = replica.traits
    model = replica.traits.base_model
    request = SampleRequest(PROMPT, SamplingParams(max_tokens=4, temperature=TEMPERATURE, seed=1))
    async with replica.answering(replica.times.probe):
        tokens = [token async for piece in dialect.sample(server, traits, model, request, 0) for token in piece.tokens]
        ids = [*PROMPT, *(token.token_id for token in tokens)]
        scores = (await dialect.score(server, traits, model, ScoreRequest(ids, len(tokens)))).scores
        largest_gap = max(abs(token.logprob - score) for token, score in zip(tokens, scores.logprobs, strict=True))
    if largest_gap > MAX_LOGPROB_ERROR:
        raise EngineUnavailable(
            f"{server.url} gives log-probs that depend on the temperature, and learning needs raw ones: "
            f"start it with {dialect.raw_logprobs_need}."
        )


async def unload_leftovers(dialect: Dialect, replica: Replica, run_dir: Path) -> None:
    """Unload the policies that this run left on the server when it was killed. Nobody else writes into its folder."""
    async with replica.answering(replica.times.probe):
        for model in (await replica.server.get(MODELS))["data"]:
            if model.get("parent") and Path(model.get("root") or "/").is_relative_to(run_dir):
                await dialect.unload(replica.server, model["id"])


async def check_adapters(dialect: Dialect, replica: Replica, name: str, model: Path, policies: Path, rank: int) -> None:
    """Raise EngineUnavailable unless the server can load an adapter of this rank from the folder of policies."""
    policies.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".probe-", dir=policies))
    try:
        write_zero_adapter(model, folder, rank)
        async with replica.answering(replica.times.load):
            await dialect.load(replica.server, name, folder.resolve())
            await dialect.unload(replica.server, name)
    except RequestRefused as error:
        raise EngineUnavailable(
            f"{replica.server.url} cannot load adapters of rank {rank} from {policies}, where the learner writes them: "
            f"{error}. The server needs {dialect.needs}; one on another machine has to see the same path."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_zero_adapter(model: Path, folder: Path, rank: int) -> None:
    """An adapter that changes nothing, in PEFT's format: it has the first layer's query projection only."""
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    out = heads * (config.get("head_dim") or hidden // heads)
    path = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {"A": np.zeros((rank, hidden), np.float32), "B": np.zeros((out, rank), np.float32)}
    save_file({path.format(side): factor for side, factor in factors.items()}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))

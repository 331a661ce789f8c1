"""The sampler of servers whose weights are all replaced with each policy version (`--lora-rank 0`)."""

import asyncio
import contextlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from openclaw_rl.engines.base import EngineError, EngineUnavailable, PolicyRef, SamplerCapabilities, WeightForm
from openclaw_rl.engines.remote.dialect import Dialect, ServerTraits
from openclaw_rl.engines.remote.http import InferenceServer, InferenceServerGone
from openclaw_rl.engines.remote.model_folder import check_model_folder, has_tied_head
from openclaw_rl.engines.remote.process import ServerProcess
from openclaw_rl.engines.remote.replica import DIED, Replica
from openclaw_rl.engines.remote.sampler import BASE_FOLDER, CLOSING, RemoteOptions, RemoteSampler, ServedPolicy
from openclaw_rl.engines.serving import TokenStream
from openclaw_rl.types import BASE_VERSION, SHARED, SampleRequest, ScoreRequest, Scores

#: What `--lora-rank 0` costs on servers of other projects, for the banner.
COST = "one policy version at a time: requests wait while a new one is loaded, and the base model is not kept"


class Version(NamedTuple):
    """A policy version with its number."""

    number: int
    policy: ServedPolicy


class FullWeightSampler(RemoteSampler):
    """Implements `Sampler` with one policy version at a time, which every server holds as its only model.

    * While a version replaces another, requests that run finish on the old one. Those that come wait, and are answered
      by the version that serves then. A request that waits may be dropped, and counts in the queue.
    * A candidate is loaded on all servers, and only requests that name it are answered until it is promoted. After
      `retract`, the version before it serves again.
    * A folder is checked before any server is told to load it. If a server cannot load it, all servers get the version
      before it again, and `publish` fails.
    * The base model is a version like others: once another one is loaded, requests that name it raise VersionGone.
    * A server says with each answer which weights computed it. If they are not those of the request's version, the
      answer fails instead of being recorded under the wrong version.
    """

    def __init__(
        self, dialect: Dialect, servers: Sequence[tuple[InferenceServer, ServerProcess | None]], options: RemoteOptions
    ) -> None:
        super().__init__(dialect, servers, options)
        for replica in self.replicas:
            replica.check_model = self._check_folder
        # Another model's sampler, such as the teacher's, may use the same folder.
        link = f"{BASE_FOLDER}-{zlib.crc32(bytes(options.model.resolve())):08x}"
        self._base_version = Version(
            BASE_VERSION, ServedPolicy(f"{self._prefix}-v{BASE_VERSION}", options.policies_folder / link)
        )
        self._wanted = self._serving = self._served_before = self._base_version
        """What every server has to hold, and what answers requests. They differ while a candidate is examined."""
        self._versions.replace_all(*self._base_version)
        self._changes = 0
        """Versions that are being loaded, or wait for that."""
        self._waiting: dict[TokenStream, SampleRequest] = {}
        self._running: set[asyncio.Future[None]] = set()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def capabilities(self) -> SamplerCapabilities:
        return replace(super().capabilities, loads=frozenset([WeightForm.MODEL]), candidates=False, keeps_base=False)

    @property
    def newest_version(self) -> int:
        return self._serving.number

    def describe(self) -> str:
        return f"{super().describe()}; {COST}"

    async def _start(self) -> None:
        base = self._base_version.policy.folder
        assert base is not None
        await asyncio.to_thread(link_model, self.options.model, base)
        try:
            await super()._start()
        except InferenceServerGone as error:
            raise self._cannot_load(error) from error

    async def _prepare_policies(self) -> None:
        """The servers have loaded the base model already, from where the learner writes policies. Raises
        EngineUnavailable if one would not replace every weight."""
        tied = await asyncio.to_thread(has_tied_head, self.options.model)
        for replica in self.replicas:
            if tied and replica.traits is not None and not replica.traits.replaces_tied_head:
                raise EngineUnavailable(
                    f"{replica.server.url} would keep the old head of this model, whose embedding is its head: on a "
                    f"CPU, {replica.traits.product} does not replace it. Train an adapter (--lora-rank 32), or use "
                    "--sampler local."
                )

    async def close(self) -> None:
        for stream in self._waiting:
            stream.fail(EngineUnavailable(CLOSING))
        self._settled.set()
        await super().close()

    async def score(self, request: ScoreRequest) -> Scores:
        while not self._closed and not self._answers(request.version):
            await self._settled.wait()
        ended = asyncio.get_running_loop().create_future()
        self._running.add(ended)
        try:
            return await super().score(request)
        finally:
            self._running.discard(ended)
            ended.set_result(None)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False, line: str = SHARED) -> None:
        self.capabilities.check_loads(policy)
        async with self._versions.publishing(version):
            try:
                await asyncio.to_thread(self._check_folder, policy.folder)
                await self._replace(Version(version, self._named(version, policy)), serves=not candidate)
            except EngineError as error:
                raise EngineUnavailable(f"Policy version {version} could not be loaded: {error}") from error

    def promote(self, version: int) -> None:
        if version == self._wanted.number:
            self._served_before, self._serving = self._serving, self._wanted
            self._let_in()

    def retract(self, version: int) -> None:
        self._versions.retract(version)
        if version == self._serving.number:
            folder = self._served_before.policy.folder
            is_there = self._served_before.number != version and folder is not None and folder.is_dir()
            self._serving = self._served_before if is_there else self._base_version
        if version == self._wanted.number:
            self._want(self._serving)
            self._changes += 1
            self._let_in()
            self._keep_until_done(asyncio.create_task(self._return_to_serving()))

    def forget(self, stream: TokenStream) -> None:
        if self._waiting.pop(stream, None) is not None:
            self._admission.leave(stream)
        else:
            super().forget(stream)

    def _version_for(self, request: SampleRequest) -> int:
        # While versions change, the one that serves may be about to be loaded.
        if request.version is None or (self._changes and request.version == self._serving.number):
            return self._serving.number
        return super()._version_for(request)

    def _begin(self, stream: TokenStream, request: SampleRequest) -> None:
        if self._answers(request.version):
            super()._begin(stream, request)
            for task in self._tasks[stream.id].values():
                self._running.add(task)
                task.add_done_callback(self._running.discard)
        else:
            self._waiting[stream] = request

    def _answers(self, version: int | None) -> bool:
        """Whether a request that names this version can be sent now."""
        return not self._changes and (self._wanted == self._serving or version == self._wanted.number)

    async def _until_idle(self) -> None:
        """Wait until the servers have computed everything that they were asked for, whether it has been read or not."""
        while self._running:
            await asyncio.wait(set(self._running))

    def _let_in(self) -> None:
        """Send the requests that waited, if nothing is being changed any more."""
        if not self._answers(None):
            self._settled.clear()
            return
        self._settled.set()
        waiting = self._waiting
        self._waiting = {}
        for stream, request in waiting.items():
            try:
                self._begin(stream, request)
            except EngineUnavailable as error:
                self._admission.leave(stream)
                stream.fail(error)

    async def _replace(self, new: Version, *, serves: bool) -> None:
        """Load a version on every server that is up, once no request runs. After an error, the one before is loaded."""
        self._changes += 1
        self._let_in()
        before = self._wanted
        try:
            await self._until_idle()
            try:
                await self._load_everywhere(new)
            except BaseException:
                await self._load_again(before)
                raise
            self._versions.latest = new.number
            if serves:
                self._served_before, self._serving = self._serving, new
        finally:
            self._changes -= 1
            self._let_in()

    async def _return_to_serving(self) -> None:
        """Load the version that serves, in place of one that was retracted. The caller has counted this change."""
        try:
            async with self._versions.changing:
                await self._until_idle()
                await self._load_again(self._wanted)
        finally:
            self._changes -= 1
            self._let_in()

    async def _load_everywhere(self, version: Version) -> None:
        """Load a version on every server that is up; servers that come back load it too. Raises EngineError."""
        self._want(version)
        assert version.policy.folder is not None
        await self._load(version.policy, version.policy.folder)

    async def _load_again(self, version: Version) -> None:
        """The same for a version that served before. A server that fails gets no requests until it holds it."""
        with contextlib.suppress(EngineError):
            await self._load_everywhere(version)
        for replica in self.replicas:
            if replica.up and not replica.holds(version.policy.name):
                replica.has_forgotten()

    def _want(self, version: Version) -> None:
        self._wanted = version
        self._versions.replace_all(*version)

    def _folders(self) -> Mapping[str, Path]:
        name, folder = self._wanted.policy
        assert folder is not None
        return {name: folder}

    def _give_up(self, name: str, error: EngineError) -> None:
        if self._wanted == self._base_version:
            raise self._cannot_load(error) from error
        super()._give_up(name, error)

    def _cannot_load(self, error: EngineError) -> EngineUnavailable:
        reason = str(error).rstrip(".")
        return EngineUnavailable(
            f"A server cannot load the model from {self.options.policies_folder}, where the learner writes policies: "
            f"{reason}. The server needs {self.dialect.reload_needs}; one on another machine has to see the same path, "
            "and the model's own folder."
        )

    def _check_folder(self, folder: Path) -> None:
        check_model_folder(folder, self.options.model)

    def _unload_soon(self, adapter: ServedPolicy) -> None:
        """A version goes when another one replaces it."""

    def _model(self, policy: ServedPolicy, traits: ServerTraits) -> str:
        return traits.base_model

    def _check_weights(
        self, replica: Replica, policy: ServedPolicy, weights: Sequence[str], stream: TokenStream | None = None
    ) -> None:
        if any(name != policy.name for name in weights):
            replica.has_forgotten()
            raise EngineUnavailable(DIED)


def link_model(model: Path, link: Path) -> None:
    """Put the base model among the policies: a server that can load it from there can read the learner's folder."""
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(model.resolve(), target_is_directory=True)

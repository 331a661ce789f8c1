"""One server of a sampler: whether it is up, what it has loaded, and how much it has to do."""

import asyncio
import contextlib
import logging
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np

from openclaw_rl.engines.base import EngineError, EngineUnavailable
from openclaw_rl.engines.remote.dialect import Dialect, ServerTraits
from openclaw_rl.engines.remote.http import InferenceServer, InferenceServerGone, RequestRefused, readable_answers
from openclaw_rl.engines.remote.model_folder import UnusableModel
from openclaw_rl.engines.remote.process import ServerProcess

log = logging.getLogger(__name__)
#: A server that misses this many health checks in a row counts as dead.
MAX_MISSED = 2
#: After this many failed starts in a row, requests do not wait for a server of our own any more.
MAX_FAILED_STARTS = 3
#: The status with which a server answers for a model name that it has not loaded.
NOT_FOUND = 404
DIED = "The inference server stopped while it was working on this request. Please send it again."
#: Tokens whose beginning is remembered as one piece; servers cache pieces of 16 or more.
BLOCK_TOKENS = 64
#: Pieces that are remembered in all, so that memory stays bounded.
MAX_REMEMBERED = 100_000
#: A server with this many more requests than the least loaded one gets no more, whatever it has cached.
MAX_IMBALANCE = 8


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """Time limits and pauses of a server, in seconds."""

    health: float = 1.0
    """How often it is asked whether it is alive."""
    health_answer: float = 10.0
    """How long it has to answer that."""
    retry: float = 0.2
    """The pause after a missed answer."""
    start: float = 1800.0
    """The longest time that a server of our own may take to load the model."""
    reload: float = 1800.0
    """The longest time that it may take to replace all its weights, after the requests that run have finished."""
    load: float = 300.0
    """The longest time that it may take to load or unload an adapter."""
    probe: float = 300.0
    """The longest time that it may take to say what it is."""
    max_pause: float = 60.0
    """The longest pause before a dead server of our own is started again."""
    unload: float = 5.0
    """The longest time that a foreign server gets to unload our versions when we end."""


class Replica:
    """A server, kept up to date.

    * It is `up` only while it answers and holds every version that the sampler holds. After a request that failed as
      if it were gone, it is looked at before it gets another one.
    * A server of our own that dies is started again; a foreign one is waited for. Either way its versions are loaded
      again before it is up; one that cannot be loaded is given up.
    * When it dies, requests in `working` fail at once.
    * A server that does not answer blocks neither `load` nor its return for ever: each call has a time limit.
    * A foreign server holds no adapter of ours any more after `close`.
    * Where versions are whole models, one replaces the one before. A server that could not load it whole gets no
      requests until it has: one of our own is started again, a foreign one is told again.
    """

    def __init__(
        self,
        dialect: Dialect,
        server: InferenceServer,
        process: ServerProcess | None,
        versions: Callable[[], Mapping[str, Path]],
        give_up: Callable[[str, EngineError], None],
        times: ReplicaTimes,
    ) -> None:
        """`versions`: the folders of the versions that it has to hold, by name. `give_up` removes one of them, which
        could not be loaded."""
        self.dialect = dialect
        self.server = server
        self.process = process
        self._versions = versions
        self._give_up = give_up
        self.times = times
        self.check_model: Callable[[Path], None] | None = None
        """If given, versions are whole models. It raises UnusableModel for a folder that must not be loaded."""
        self.traits: ServerTraits | None = None
        self.trouble = "It has not been asked yet."
        """Why it is not up."""
        self.restarts = 0
        self._loaded: set[str] = set()
        self._up = asyncio.Event()
        self._suspected = asyncio.Event()
        self._forgot_versions = False
        self._reloading = False
        self._half_loaded = False
        self._catches_up = False
        self._failed_starts = 0
        self._deadlines: set[asyncio.Timeout] = set()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._up.is_set()

    @property
    def running(self) -> int:
        """Requests that it works on."""
        return len(self._deadlines)

    @property
    def comes_back(self) -> bool:
        """Whether it is worth waiting for: it is being looked at or given its versions again, or a server of our own is
        being started again."""
        starts = self.process is not None and not self.up and self._failed_starts < MAX_FAILED_STARTS
        return self._suspected.is_set() or self._catches_up or starts

    async def start(self) -> None:
        """Return when it is up. Raises EngineUnavailable with the reason if it does not get there."""
        await self._bring_up()
        self._keeper = asyncio.create_task(self._keep())

    async def close(self) -> None:
        self._down("The server is shutting down.")
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        if self.process is not None:
            await self.process.stop()
            if self.traits is not None:
                self.process.remove_log()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.times.unload):
                    for name in list(self._loaded):
                        await self.unload(name)
        await self.server.close()

    async def wait_until_up(self) -> None:
        await self._up.wait()

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[ServerTraits]:
        """The length of a request. It raises InferenceServerGone when the server dies or hangs."""
        assert self.traits is not None
        deadline = asyncio.timeout(None)
        self._deadlines.add(deadline)
        try:
            with readable_answers(self.server.url):
                async with deadline:
                    yield self.traits
        except TimeoutError:
            raise InferenceServerGone(DIED) from None
        except InferenceServerGone as error:
            log.warning("A request to %s failed: %s", self.server.url, error)
            self._suspect()
            raise InferenceServerGone(DIED) from error
        except RequestRefused as error:
            if error.status == NOT_FOUND:
                # A foreign server that was started again in the meantime has no adapters.
                self.has_forgotten()
                raise InferenceServerGone(DIED) from error
            raise
        finally:
            self._deadlines.discard(deadline)

    @contextlib.asynccontextmanager
    async def answering(self, seconds: float) -> AsyncIterator[None]:
        """The length of calls that have a time limit. Raises EngineUnavailable also for answers of another form."""
        try:
            with readable_answers(self.server.url):
                async with asyncio.timeout(seconds):
                    yield
        except TimeoutError:
            raise InferenceServerGone(f"{self.server.url} does not answer within {seconds:g} s.") from None

    def holds(self, name: str) -> bool:
        return name in self._loaded

    def has_forgotten(self) -> None:
        """It answers, but does not hold its versions any more."""
        self._forgot_versions = True
        self._suspect()

    async def load(self, name: str, folder: Path) -> None:
        """Load a version. Raises EngineError."""
        if name not in self._loaded:
            if self.check_model is None:
                async with self.answering(self.times.load):
                    await self.dialect.load(self.server, name, folder)
            else:
                await asyncio.to_thread(self.check_model, folder)
                await self._reload(name, folder)
            self._loaded.add(name)

    async def _reload(self, name: str, folder: Path) -> None:
        self._loaded.clear()
        self._reloading = self._half_loaded = True
        try:
            async with self.answering(self.times.reload):
                await self.dialect.reload(self.server, name, folder)
            self._half_loaded = False
        except RequestRefused:
            # It has changed nothing.
            self._half_loaded = False
            raise
        finally:
            self._reloading = False
            if self._half_loaded and self.up:
                self.has_forgotten()

    async def unload(self, name: str) -> None:
        """Unload a version, if the server can be reached and has it."""
        if name in self._loaded and self.check_model is None:
            self._loaded.discard(name)
            with contextlib.suppress(EngineError):
                async with self.answering(self.times.load):
                    await self.dialect.unload(self.server, name)

    async def _bring_up(self) -> None:
        # A server of our own is not asked to repair half-loaded weights, but started again.
        fit = self.process is None or (self.process.running and not self._half_loaded)
        alive = fit and await self._alive()
        if not alive and self.process is None:
            raise EngineUnavailable(f"No {self.dialect.name} server answers at {self.server.url}: {self.trouble}")
        if not alive:
            await self._start_process()
        self._loaded.clear()
        if self.check_model is not None:
            # First, because a server that was left in the middle of a change is paused and would not answer a probe.
            await self._load_missing()
        await self._probe()
        await self._load_missing()
        self.trouble = ""
        self._up.set()

    async def _probe(self) -> None:
        try:
            async with self.answering(self.times.probe):
                self.traits = await self.dialect.probe(self.server)
        except InferenceServerGone as error:
            where = f" Its log is {self.process.log}." if self.process is not None else ""
            raise EngineUnavailable(f"{error}{where}") from error

    async def _load_missing(self) -> None:
        # A version may be published while others are being loaded.
        while missing := {name: folder for name, folder in self._versions().items() if not self.holds(name)}:
            for name, folder in missing.items():
                await self._load_again(name, folder)

    async def _load_again(self, name: str, folder: Path) -> None:
        try:
            await self.load(name, folder)
        except (RequestRefused, UnusableModel) as error:
            # A foreign server that was away for a moment may still hold it; a folder may be gone.
            if isinstance(error, RequestRefused) and error.status == 400 and "already" in str(error):
                self._loaded.add(name)
            else:
                self._give_up(name, error)

    async def _start_process(self) -> None:
        assert self.process is not None
        await self.process.stop()
        await self.process.start()
        ended = asyncio.create_task(self.process.wait())
        try:
            async with asyncio.timeout(self.times.start):
                while not await self._alive():
                    if not self.process.running:
                        raise EngineUnavailable(self.process.why_it_ended())
                    await asyncio.wait([ended], timeout=self.times.health)
        except TimeoutError:
            raise EngineUnavailable(
                f"The {self.dialect.name} server did not start in {self.times.start:.0f} s."
            ) from None
        finally:
            ended.cancel()

    async def _alive(self) -> bool:
        try:
            await self.server.get(self.dialect.health, self.times.health_answer)
        except EngineError as error:
            self.trouble = str(error)
            return False
        return True

    async def _keep(self) -> None:
        """Watch the server; when it dies, tell those who wait and bring it up again."""
        while True:
            try:
                await self._until_dead()
            except Exception as error:
                log.exception("The health of %s could not be found out.", self.server.url)
                self.trouble = f"Its health could not be found out: {error!r}."
            self._down(self.trouble)
            self.restarts += 1
            log.error("%s at %s is gone: %s", self.dialect.name, self.server.url, self.trouble)
            while not self.up:
                failed = self._failed_starts
                await asyncio.sleep(min(self.times.max_pause, 2.0 ** (failed - 1)) if failed else 0.0)
                try:
                    await self._bring_up()
                    self._failed_starts = 0
                    log.info("%s at %s is back.", self.dialect.name, self.server.url)
                # Whatever goes wrong, requests wait for this task: it must try again.
                except Exception as error:
                    trace = None if isinstance(error, EngineError) else error
                    log.error(
                        "%s at %s did not come back: %s", self.dialect.name, self.server.url, error, exc_info=trace
                    )
                    # Clients read this: the first line, without the end of the server's log.
                    self.trouble = str(error).partition("\n")[0]
                    self._failed_starts += 1
                finally:
                    self._catches_up = False

    def _suspect(self) -> None:
        self._up.clear()
        self._suspected.set()

    async def _until_dead(self) -> None:
        missed = 0
        while missed < MAX_MISSED:
            if missed:
                await asyncio.sleep(self.times.retry)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._suspected.wait(), self.times.health)
            if self.process is not None and not self.process.running:
                self.trouble = "Its process ended."
                log.error(self.process.why_it_ended())
                return
            # Some servers answer nothing while they replace their weights; the call that waits for it has an end.
            missed = 0 if self._reloading or await self._alive() else missed + 1
            if self._forgot_versions:
                self._forgot_versions = False
                self._catches_up = True
                self.trouble = "It does not hold its policies any more."
                return
            if not missed:
                self._suspected.clear()
                self._up.set()

    def _down(self, reason: str) -> None:
        self._up.clear()
        self._suspected.clear()
        self.trouble = reason
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now)


class Router:
    """Sends a prompt where the longest beginning of it was sent last, and others to the server with the least to do.

    A session's next request extends its last one, so it goes to the same server, as do the judge and the teacher.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._seen: OrderedDict[int, Replica] = OrderedDict()
        self._turns = count()

    def choose(self, prompt_ids: Sequence[int], model: str) -> Replica | None:
        """The server for a prompt; None if none is up."""
        up = [replica for replica in self.replicas if replica.up]
        if not up:
            return None
        if len(self.replicas) == 1:
            return up[0]
        blocks = block_hashes(prompt_ids, model)
        least = min(replica.running for replica in up)
        cached = next((self._seen[block] for block in reversed(blocks) if block in self._seen), None)
        if cached is None or not cached.up or cached.running > least + MAX_IMBALANCE:
            idle = [replica for replica in up if replica.running == least]
            cached = idle[next(self._turns) % len(idle)]
        self._remember(blocks, cached)
        return cached

    def _remember(self, blocks: Sequence[int], replica: Replica) -> None:
        for block in blocks:
            self._seen[block] = replica
            self._seen.move_to_end(block)
        while len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)


def block_hashes(ids: Sequence[int], model: str) -> list[int]:
    """A number for each beginning of a prompt that is a whole number of blocks, the shortest first."""
    data = np.asarray(ids, np.int32).tobytes()
    step = BLOCK_TOKENS * 4
    value = hash(model)
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        value = hash((value, zlib.crc32(data[start : start + step])))
        hashes.append(value)
    return hashes

"""What samplers share: the policy versions that one holds and which of them serves, and the streams of its requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from openclaw_rl.engines.base import ChatCall, EngineLimits, EngineUnavailable, QueueFull, TextPiece, VersionGone
from openclaw_rl.types import BASE_VERSION, SHARED, Priority, SampledToken, SampleRequest

Weights = TypeVar("Weights")
Item = TypeVar("Item", SampledToken, TextPiece)


@dataclass(eq=False)
class Use:
    """A request that needs a version until it is released."""

    version: int
    waits: bool
    """Until the version is loaded."""
    give_way: Callable[[], None] | None = None
    """Ends the request, if it is one for idle times: it may rest for as long as somebody else is served."""


class PolicyVersions(Generic[Weights]):
    """The versions that a sampler holds, each with what the engine needs to sample from it.

    * A version number is never given to two policies.
    * A request that names no version gets the newest of its line that is not a candidate. A line that has none is
      served by the shared line, and that one by the base model.
    * A candidate serves only requests that name it, until it is promoted or retracted.
    * A version that is retracted while requests use it goes when the last of them ends.
    * Neither the newest version of the shared line nor a version in use is evicted. The base model has a place of its
      own. Of the others those go first that serve nobody any more, then those that were used least recently.
    * With `load`, a version that is evicted and may be needed is kept in mind, and loaded again for whoever needs it.
    * Nobody waits without limit for a place: while somebody waits, new requests for the version that goes first wait
      behind them, and those for idle times that use it end.
    """

    def __init__(
        self,
        capacity: int,
        on_drop: Callable[[Weights], None] | None = None,
        load: Callable[[int, Weights], Awaitable[Weights]] | None = None,
    ) -> None:
        """`capacity`: versions held at the same time, in addition to the base model. `on_drop` gets what a retracted
        version needed, once no request uses it. `load` makes room and loads a version."""
        self.capacity = capacity
        self._on_drop = on_drop
        self._load = load
        self.latest = BASE_VERSION
        """The highest version that was ever held."""
        self._held: dict[int, Weights] = {}
        """In the order of their last use."""
        self._unloaded: dict[int, Weights] = {}
        """What to load again when it is needed."""
        self._lines: dict[int, str] = {}
        """The line of each version that is not of the shared line."""
        self._versions: dict[str, list[int]] = {}
        """The versions of each line: there may be thousands of lines, with one or two versions each."""
        self._candidates: set[int] = set()
        self._retracted: set[int] = set()
        self._uses: set[Use] = set()
        self._leaving: int | None = None
        """The version that makes room for somebody who waits, once the requests that use it have ended."""
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._released = asyncio.Event()
        self.changing = asyncio.Lock()
        """Held while a version is published or taken away, where that takes time."""

    @property
    def all(self) -> Mapping[int, Weights]:
        """With the base model."""
        return self._held

    @property
    def held(self) -> Mapping[int, Weights]:
        """Without the base model."""
        return {version: weights for version, weights in self._held.items() if version != BASE_VERSION}

    @property
    def newest(self) -> int:
        """Of the shared line."""
        return self.newest_of(SHARED)

    def newest_of(self, line: str) -> int:
        """The version that serves a line."""
        newest = max(self._serving(line), default=BASE_VERSION)
        return newest if newest or line == SHARED else self.newest_of(SHARED)

    def _serving(self, line: str) -> Iterator[int]:
        apart = self._candidates | self._retracted
        return (version for version in self.of_line(line) if version not in apart)

    def of_line(self, line: str) -> list[int]:
        """All versions of a line, candidates among them."""
        known = self._versions.get(line, ())
        return [version for version in known if version in self._held or version in self._unloaded]

    def find(self, version: int | None, line: str = SHARED) -> tuple[int, Weights]:
        """The version that answers a request which names `version`, or else a line, and what it needs, which has to be
        loaded first if it is not `held`. Raises VersionGone."""
        wanted = self.newest_of(line) if version is None else version
        known = self._held if wanted in self._held else self._unloaded
        if wanted not in known or wanted in self._retracted:
            raise VersionGone(f"Policy version {wanted} is not loaded.")
        return wanted, known[wanted]

    @contextlib.asynccontextmanager
    async def publishing(self, version: int, line: str = SHARED) -> AsyncIterator[None]:
        """One publication at a time. Raises EngineUnavailable if the number is not a new one of the line."""
        async with self.changing:
            latest = self.latest if line == SHARED else max(self.of_line(line), default=BASE_VERSION)
            if version <= latest:
                raise EngineUnavailable(f"Policy version {version} is not newer than {latest}.")
            yield

    def replace_all(self, version: int, weights: Weights) -> None:
        """Hold this version and no other, not even the base model."""
        self._held = {version: weights}
        self._versions = {SHARED: [version]}

    def add(
        self, version: int, weights: Weights, *, candidate: bool = False, line: str = SHARED, loaded: bool = True
    ) -> None:
        """Hold a version; one that is not `loaded` yet is loaded when it is needed."""
        if candidate:
            self._candidates.add(version)
        (self._held if loaded else self._unloaded)[version] = weights
        self._versions[line] = [*self.of_line(line), version]
        if line == SHARED:
            self.latest = max(self.latest, version)
        else:
            self._lines[version] = line
        self._forget_unwanted(line)

    def promote(self, version: int) -> None:
        self._candidates.discard(version)
        self._forget_unwanted(self._lines.get(version, SHARED))

    async def loaded(self, use: Use) -> Weights:
        """What the version of a request needs, which is loaded first if it is not. Raises EngineUnavailable."""
        if use.waits:
            # One load for all who need it: a second one would keep the version from making room while it waits.
            if use.version not in self._loads:
                loading = self._loads[use.version] = asyncio.create_task(self._load_again(use.version))
                loading.add_done_callback(lambda _: self._loads.pop(use.version))
            await asyncio.shield(self._loads[use.version])
        return self.find(use.version)[1]

    async def _load_again(self, version: int) -> None:
        async with self.changing:
            _, weights = self.find(version)
            # Another version may have made room instead of this one.
            if version not in self._held and self._load is not None:
                weights = await self._load(version, weights)
            self._unloaded.pop(version, None)
            self._held[version] = weights
            for use in self._uses:
                use.waits = use.waits and use.version != version

    def retract(self, version: int) -> None:
        """Hold a version no longer, once no request uses it."""
        self._retracted.add(version)
        self._candidates.discard(version)
        self._unloaded.pop(version, None)
        self._drop_if_retracted(version)

    def _is_wanted(self, version: int) -> bool:
        """Whether requests may still need a version that is not in use."""
        return version in self._candidates or version == self.newest_of(self._lines.get(version, SHARED))

    def _is_kept_in_mind(self, version: int) -> bool:
        """Whether a version may have to be loaded again: also for a request that waits for it, and because what served
        before the newest one serves again if that is retracted."""
        line = self._lines.get(version, SHARED)
        return version in self._candidates or self._is_used(version) or version in sorted(self._serving(line))[-2:]

    def _is_used(self, version: int) -> bool:
        return any(use.version == version for use in self._uses)

    def _forget_unwanted(self, line: str) -> None:
        for version in self.of_line(line):
            if version in self._unloaded and not self._is_kept_in_mind(version):
                del self._unloaded[version]

    def use(self, version: int) -> Use:
        """Keep a version from being evicted until `release`, or from being forgotten until it is `loaded`."""
        waits = self._load is not None and (version in self._unloaded or version == self._leaving)
        use = Use(version, waits)
        self._uses.add(use)
        if not waits and version in self._held:
            self._held[version] = self._held.pop(version)
        return use

    def release(self, use: Use) -> None:
        version = use.version
        self._uses.discard(use)
        self._drop_if_retracted(version)
        if version in self._unloaded:
            self._forget_unwanted(self._lines.get(version, SHARED))

    def _drop_if_retracted(self, version: int) -> None:
        if version in self._retracted and not self._is_used(version) and version in self._held:
            weights = self._held.pop(version)
            if self._on_drop is not None:
                self._on_drop(weights)
        self._released.set()

    def evict(self) -> dict[int, Weights] | None:
        """If no place is free, evict the version that may go first.

        Returns what was evicted, for `restore`; None if every version has to stay.
        """
        if len(self.held) < self.capacity:
            return {}
        busy = {use.version for use in self._uses if not use.waits}
        gone = self._first_to_go(version for version in self.held if version not in busy)
        if gone is None:
            return None
        is_kept = self._load is not None and self._is_kept_in_mind(gone)
        weights = self._held.pop(gone)
        if is_kept:
            self._unloaded[gone] = weights
        return {gone: weights}

    def _first_to_go(self, among: Iterable[int]) -> int | None:
        may_go = [version for version in among if version != self.newest]
        return min((version for version in may_go if not self._is_wanted(version)), default=next(iter(may_go), None))

    async def make_room(self) -> dict[int, Weights]:
        """The same, but wait until a version may go. Hold `changing` meanwhile."""
        try:
            while (evicted := self.evict()) is None:
                if self._leaving not in self._held:
                    self._choose_leaving()
                self._released.clear()
                await self._released.wait()
        finally:
            self._leaving = None
        return evicted

    def _choose_leaving(self) -> None:
        """Choose the version that makes room: one that is only used for idle times, if there is one."""
        needed = {use.version for use in self._uses if use.give_way is None}
        idle = self._first_to_go(version for version in self.held if version not in needed)
        self._leaving = self._first_to_go(self.held) if idle is None else idle
        for use in [use for use in self._uses if use.version == self._leaving]:
            if use.give_way is not None:
                use.give_way()

    def restore(self, evicted: Mapping[int, Weights]) -> None:
        """Hold versions again that were evicted in vain."""
        for version, weights in evicted.items():
            self._unloaded.pop(version, None)
            self._held[version] = weights


class PolicyHolder(Generic[Weights]):
    """What a sampler says of the policies that it holds in `PolicyVersions`."""

    _versions: PolicyVersions[Weights]

    @property
    def newest_version(self) -> int:
        return self._versions.newest

    def newest_of(self, line: str) -> int:
        return self._versions.newest_of(line)

    def versions_of(self, line: str) -> list[int]:
        return self._versions.of_line(line)

    def promote(self, version: int) -> None:
        self._versions.promote(version)

    def retract(self, version: int) -> None:
        self._versions.retract(version)


class StreamOwner(Protocol):
    """The sampler that a stream belongs to."""

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request, or one of its completions."""

    def forget(self, stream: Any) -> None:
        """The stream has ended; stop its completions that still run."""


class ItemStream(Generic[Item]):
    """The tokens or the pieces of one request. Ends after the last one of the last completion, or with an error."""

    def __init__(self, owner: StreamOwner, id: int, version: int, n: int) -> None:
        self.id = id
        self.version = version
        self._owner = owner
        self._open = set(range(n))
        self._arrived: list[Item] = []
        self._error: EngineUnavailable | None = None
        self._wake = asyncio.Event()

    @property
    def running(self) -> int:
        """Completions that are not finished."""
        return len(self._open)

    def is_open(self, index: int) -> bool:
        """Whether a completion is neither finished nor dropped."""
        return index in self._open

    def feed(self, items: list[Item]) -> None:
        for item in items:
            if item.index in self._open:
                self._arrived.append(item)
                if item.finish is not None:
                    self._open.discard(item.index)
        self._wake.set()

    def fail(self, error: EngineUnavailable) -> None:
        self._error = error
        self._wake.set()

    def drop(self, index: int) -> None:
        if index in self._open:
            self._open.discard(index)
            self._owner.cancel(self.id, index)
            self._wake.set()

    def close(self) -> None:
        self._owner.forget(self)
        self._open.clear()
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[list[Item]]:
        try:
            while self._arrived or self._open:
                if not self._arrived:
                    if self._error is not None:
                        raise self._error
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                batch = self._arrived
                self._arrived = []
                yield batch
        finally:
            self.close()


class TokenStream(ItemStream[SampledToken]):
    """Implements `SampleStream`."""

    use: Use
    """Of its version, where the sampler counts them."""
    cached_tokens = 0


class PieceStream(ItemStream[TextPiece]):
    """Implements `TextStream`. The answers of one call count together."""

    def __init__(self, owner: StreamOwner, id: int, version: int, n: int) -> None:
        super().__init__(owner, id, version, n)
        self.usage: dict[str, int] = {}


#: What a sampler's requests have.
AnyStream = TokenStream | PieceStream


class Admission:
    """Counts the unfinished sequences of a sampler and refuses those that the queue has no room for.

    * A request that does not fit is refused at once with QueueFull, so that no wait is unbounded.
    * Users and background work are counted apart, so neither is refused because of the other.
    * A completion that is finished or dropped frees its place at once.
    """

    def __init__(self, max_sequences: int, max_queue: int) -> None:
        self.max_sequences = max_sequences
        self.max_queue = max_queue
        self._streams: dict[AnyStream, Priority] = {}

    @property
    def outstanding(self) -> int:
        """Sequences that are not finished, whether they are being sampled or wait."""
        return sum(stream.running for stream in self._streams)

    def limits(self, max_context_tokens: int) -> EngineLimits:
        return EngineLimits(max_context_tokens, self.max_sequences, self.max_sequences + self.max_queue)

    def check(self, request: SampleRequest | ChatCall) -> None:
        """Raise QueueFull if the request does not fit."""
        counted = sum(stream.running for stream, priority in self._streams.items() if priority is request.priority)
        if counted + request.n > self.max_sequences + self.max_queue:
            raise QueueFull(max(0, counted - self.max_sequences))

    def enter(self, stream: AnyStream, priority: Priority) -> None:
        """Count a stream until it leaves."""
        self._streams[stream] = priority

    def leave(self, stream: AnyStream) -> None:
        self._streams.pop(stream, None)

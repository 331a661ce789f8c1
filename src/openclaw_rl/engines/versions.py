"""Which policy versions a sampler holds, and which of them serves."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Generic, TypeVar

from openclaw_rl.engines.base import EngineUnavailable, VersionGone
from openclaw_rl.types import BASE_VERSION

Weights = TypeVar("Weights")


class PolicyVersions(Generic[Weights]):
    """The versions that a sampler holds, each with what the engine needs to sample from it.

    * A version number is never given to two policies.
    * A request that names no version gets the newest that is not a candidate, or else the base model.
    * A candidate serves only requests that name it, until it is promoted or retracted.
    * A version that is retracted while requests use it goes when the last of them ends.
    * Neither the newest version nor a version in use is evicted. The base model has a place of its own.
    """

    def __init__(self, capacity: int, on_drop: Callable[[Weights], None] | None = None) -> None:
        """`capacity`: versions held at the same time, in addition to the base model. `on_drop` gets what a retracted
        version needed, once no request uses it."""
        self.capacity = capacity
        self._on_drop = on_drop
        self.latest = BASE_VERSION
        """The highest version that was ever held."""
        self._held: dict[int, Weights] = {}
        self._candidates: set[int] = set()
        self._retracted: set[int] = set()
        self._uses: Counter[int] = Counter()
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
        apart = self._candidates | self._retracted
        return max((version for version in self._held if version not in apart), default=BASE_VERSION)

    def find(self, version: int | None) -> tuple[int, Weights]:
        """The version that answers a request which names `version`, and its weights. Raises VersionGone."""
        wanted = self.newest if version is None else version
        if wanted not in self._held or wanted in self._retracted:
            raise VersionGone(f"Policy version {wanted} is not loaded.")
        return wanted, self._held[wanted]

    @contextlib.asynccontextmanager
    async def publishing(self, version: int) -> AsyncIterator[None]:
        """One publication at a time. Raises EngineUnavailable if the number is not a new one."""
        async with self.changing:
            if version <= self.latest:
                raise EngineUnavailable(f"Policy version {version} is not newer than {self.latest}.")
            yield

    def replace_all(self, version: int, weights: Weights) -> None:
        """Hold this version and no other, not even the base model."""
        self._held = {version: weights}

    def add(self, version: int, weights: Weights, *, candidate: bool = False) -> None:
        if candidate:
            self._candidates.add(version)
        self._held[version] = weights
        self.latest = max(self.latest, version)

    def promote(self, version: int) -> None:
        self._candidates.discard(version)

    def retract(self, version: int) -> None:
        """Hold a version no longer, once no request uses it."""
        self._retracted.add(version)
        self._candidates.discard(version)
        self._drop_if_retracted(version)

    def use(self, version: int) -> None:
        """Keep a version from being evicted until `release` has been called as often."""
        self._uses[version] += 1

    def release(self, version: int) -> None:
        self._uses[version] -= 1
        self._drop_if_retracted(version)

    def _drop_if_retracted(self, version: int) -> None:
        if version in self._retracted and not self._uses[version] and version in self._held:
            weights = self._held.pop(version)
            if self._on_drop is not None:
                self._on_drop(weights)
        self._released.set()

    def evict(self) -> dict[int, Weights] | None:
        """If no place is free, evict the oldest version that may go.

        Returns what was evicted, for `restore`; None if every version has to stay.
        """
        if len(self.held) < self.capacity:
            return {}
        idle = [version for version in self.held if not self._uses[version] and version != self.newest]
        return {min(idle): self._held.pop(min(idle))} if idle else None

    async def make_room(self) -> dict[int, Weights]:
        """The same, but wait until a version may go."""
        while (evicted := self.evict()) is None:
            self._released.clear()
            await self._released.wait()
        return evicted

    def restore(self, evicted: Mapping[int, Weights]) -> None:
        """Hold versions again that were evicted in vain."""
        self._held.update(evicted)

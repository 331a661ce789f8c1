"""The stream of one request's tokens or text, and how many sequences a sampler accepts at a time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, Protocol, TypeVar

from openclaw_rl.engines.base import ChatCall, EngineLimits, EngineUnavailable, QueueFull, TextPiece
from openclaw_rl.engines.versions import Use
from openclaw_rl.types import Priority, SampledToken, SampleRequest

Item = TypeVar("Item", SampledToken, TextPiece)


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

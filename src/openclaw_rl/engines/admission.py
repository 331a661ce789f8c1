"""Limits how many sequences a sampler accepts at a time."""

from typing import Protocol

from openclaw_rl.engines.base import EngineLimits
from openclaw_rl.engines.errors import QueueFull
from openclaw_rl.types import Priority, SampleRequest


class CountedStream(Protocol):
    """A stream that says how many of its completions are not finished."""

    @property
    def running(self) -> int: ...


class Admission:
    """Counts the unfinished sequences of a sampler and refuses those that the queue has no room for.

    * A request that does not fit is refused at once with QueueFull, so that no wait is unbounded.
    * Users and background work are counted apart, so neither is refused because of the other.
    * A completion that is finished or dropped frees its place at once.
    """

    def __init__(self, max_sequences: int, max_queue: int) -> None:
        self.max_sequences, self.max_queue = max_sequences, max_queue
        self._streams: dict[CountedStream, Priority] = {}

    @property
    def outstanding(self) -> int:
        """Sequences that are not finished, whether they are being sampled or wait."""
        return sum(stream.running for stream in self._streams)

    def limits(self, max_context_tokens: int) -> EngineLimits:
        return EngineLimits(max_context_tokens, self.max_sequences, self.max_sequences + self.max_queue)

    def check(self, request: SampleRequest) -> None:
        """Raise QueueFull if the request does not fit."""
        counted = sum(stream.running for stream, priority in self._streams.items() if priority is request.priority)
        if counted + request.n > self.max_sequences + self.max_queue:
            raise QueueFull(max(0, counted - self.max_sequences))

    def enter(self, stream: CountedStream, priority: Priority) -> None:
        """Count a stream until it leaves."""
        self._streams[stream] = priority

    def leave(self, stream: CountedStream) -> None:
        self._streams.pop(stream, None)

"""A sampler without a model: says what it is told to, as fast or as slowly as a test needs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from openclaw_rl.engines.base import EngineLimits, EngineStats, EngineUnavailable, QueueFull
from openclaw_rl.types import BASE_VERSION, FinishReason, SampledToken, SampleRequest


class ScriptedSampler:
    """Implements `Sampler`. `script(request, index)` gives the ids of each completion, end token included."""

    def __init__(
        self,
        script: Callable[[SampleRequest, int], Sequence[int]],
        *,
        seconds_per_token: float = 0.0,
        max_context: int = 4096,
    ) -> None:
        self.script, self.seconds_per_token = script, seconds_per_token
        self.limits = EngineLimits(max_context, max_sequences=64, max_choices=64)
        self.newest_version = BASE_VERSION
        self.requests: list[SampleRequest] = []
        self.full = False
        self.dies_after: int | None = None
        self.sent = 0
        self.open = 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, version: int, adapter: Path) -> None:
        self.newest_version = version

    def stats(self) -> EngineStats:
        return EngineStats(True, self.open, 0, 0)

    def sample(self, request: SampleRequest) -> "ScriptedStream":
        if self.full:
            raise QueueFull(7, retry_after=3)
        self.requests.append(request)
        return ScriptedStream(self, request)


class ScriptedStream:
    """One token of every completion at a time."""

    def __init__(self, sampler: ScriptedSampler, request: SampleRequest) -> None:
        self.version, self.cached_tokens = sampler.newest_version, 0
        self._sampler, self._request = sampler, request
        self._ids = {index: list(sampler.script(request, index)) for index in range(request.n)}
        sampler.open += 1
        self._closed = False

    def drop(self, index: int) -> None:
        self._ids.pop(index, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sampler.open -= 1
            self._ids.clear()

    async def __aiter__(self) -> AsyncIterator[list[SampledToken]]:
        position = 0
        while self._ids:
            if self._sampler.seconds_per_token:
                await asyncio.sleep(self._sampler.seconds_per_token)
            if self._sampler.dies_after is not None and position >= self._sampler.dies_after:
                raise EngineUnavailable("The worker died.")
            yield [self._token(index, position) for index in list(self._ids)]
            self._ids = {index: ids for index, ids in self._ids.items() if position + 1 < len(ids)}
            position += 1

    def _token(self, index: int, position: int) -> SampledToken:
        ids, params = self._ids[index], self._request.params
        self._sampler.sent += 1
        finish = FinishReason.STOP if position + 1 == len(ids) else None
        if position + 1 == params.max_tokens and finish is None:
            finish = FinishReason.LENGTH
            self._ids[index] = ids[: position + 1]
        top = tuple((id, -1.0 - id) for id in range(params.top_logprobs))
        return SampledToken(index, ids[position], -0.5, top, finish)

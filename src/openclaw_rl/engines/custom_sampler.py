"""Generation by the user's function: `async generate(request, sampler)` returns the tokens of all completions.

The function may call the sampler as often as it likes. Clients get the tokens that it returns, and training uses them,
so they must be tokens that the sampler drew, with their log-probs. Each completion must be whole: its last token, and
only that one, has a finish.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import (
    EngineLimits,
    EngineStats,
    EngineUnavailable,
    PolicyRef,
    Sampler,
    SamplerCapabilities,
    SampleStream,
)
from openclaw_rl.plugins import describe, load_plugin
from openclaw_rl.types import Priority, SampledToken, SampleRequest, ScoreRequest, Scores

OPTION = "--custom-generate-function-path"
NAMES = ("generate",)
Generate = Callable[[SampleRequest, Sampler], Awaitable[list[SampledToken]]]


class CustomSampler:
    """Implements `Sampler` around another one.

    * Requests from users are answered by the custom function; everything else goes to the inner sampler.
    * A completion is of one policy version: the one that was newest when the request came.
    * Tokens that are not whole completions are refused with a sentence, and never reach a client.
    """

    def __init__(self, inner: Sampler, path: str) -> None:
        self.inner = inner
        self.file = Path(path.partition(":")[0]).expanduser()
        self.function: Generate = load_plugin(path, OPTION, NAMES)

    @property
    def capabilities(self) -> SamplerCapabilities:
        return self.inner.capabilities

    @property
    def limits(self) -> EngineLimits:
        return self.inner.limits

    @property
    def newest_version(self) -> int:
        return self.inner.newest_version

    def stats(self) -> EngineStats:
        return self.inner.stats()

    async def start(self) -> None:
        await self.inner.start()

    async def close(self) -> None:
        await self.inner.close()

    def describe(self) -> str:
        return self.inner.describe()

    def sample(self, request: SampleRequest) -> SampleStream:
        if request.priority is not Priority.USER:
            return self.inner.sample(request)
        return CustomStream(self, request)

    async def score(self, request: ScoreRequest) -> Scores:
        return await self.inner.score(request)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        await self.inner.publish(version, policy, candidate=candidate)

    def promote(self, version: int) -> None:
        self.inner.promote(version)

    def retract(self, version: int) -> None:
        self.inner.retract(version)


class CustomStream:
    """Gives all tokens at once, when the custom function returns them."""

    cached_tokens = 0

    def __init__(self, sampler: CustomSampler, request: SampleRequest) -> None:
        # The function may take long, and the answer must be of one policy.
        self.version = sampler.newest_version if request.version is None else request.version
        self._sampler = sampler
        self._n = request.n
        self._request = replace(request, version=self.version)
        self._dropped: set[int] = set()

    def drop(self, index: int) -> None:
        self._dropped.add(index)

    def close(self) -> None:
        self._dropped.update(range(self._n))

    async def __aiter__(self) -> AsyncIterator[list[SampledToken]]:
        try:
            tokens = await self._sampler.function(self._request, self._sampler.inner)
            problem = problem_with(tokens, self._n)
        except EngineUnavailable:
            raise
        except Exception as error:
            raise EngineUnavailable(f"The custom generation failed: {describe(error, self._sampler.file)}.") from error
        if problem:
            raise EngineUnavailable(f"The custom generation in {self._sampler.file.name} {problem}.")
        yield [token for token in tokens if token.index not in self._dropped]


def problem_with(tokens: Any, n: int) -> str:
    """Why these tokens are not n whole completions; empty if they are."""
    if not isinstance(tokens, list) or not all(isinstance(token, SampledToken) for token in tokens):
        return "did not return a list of SampledToken"
    for index in range(n):
        completion = [token for token in tokens if token.index == index]
        if not completion or completion[-1].finish is None or any(token.finish for token in completion[:-1]):
            return f"did not return a whole completion {index}: its last token, and only that one, has a finish"
    return "" if all(token.index < n for token in tokens) else f"returned more than {n} completions"

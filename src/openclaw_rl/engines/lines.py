"""Lines of policies on one engine: beside the shared line, each person can have one of their own."""

from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from openclaw_rl.engines.base import (
    EngineLimits,
    EngineStats,
    Learner,
    PolicyRef,
    Sampler,
    SamplerCapabilities,
    SampleStream,
)
from openclaw_rl.types import SHARED, SampleRequest, ScoreRequest, Scores


class SamplerOfLines(Sampler, Protocol):
    """A sampler that serves several lines.

    * A request that names no version is answered by the newest of its line (`SampleRequest.line`).
    * A policy that is not loaded is loaded when a request needs it. That request waits for it, others do not.
    """

    async def publish(
        self, version: int, policy: PolicyRef, *, candidate: bool = False, line: str = SHARED
    ) -> None: ...

    def newest_of(self, line: str) -> int:
        """The version that serves a line: its own, or else that of the shared line."""

    def versions_of(self, line: str) -> list[int]:
        """All versions of a line that the sampler holds or can load."""


class LearnerOfLines(Learner, Protocol):
    """A learner that holds the base weights once, and the policy in training of each line.

    Of all its lines one call runs at a time. A line that it does not hold must be loaded or reset first.
    """

    def for_line(self, line: str) -> Learner: ...

    def drop_line(self, line: str) -> Awaitable[None]:
        """Hold the policy in training of a line no longer."""

    def erase(self, folder: Path, run_dir: Path) -> Awaitable[None]:
        """Delete what the files below a folder refer to elsewhere, because they are about to be deleted.

        What other files of the run refer to stays: a line begins from a state of the shared line.
        """


class LineSampler:
    """Implements `Sampler` for one line of a sampler that serves several."""

    def __init__(self, sampler: SamplerOfLines, line: str) -> None:
        self.sampler = sampler
        self.line = line

    @property
    def capabilities(self) -> SamplerCapabilities:
        return self.sampler.capabilities

    @property
    def limits(self) -> EngineLimits:
        return self.sampler.limits

    @property
    def newest_version(self) -> int:
        return self.sampler.newest_of(self.line)

    def stats(self) -> EngineStats:
        return self.sampler.stats()

    async def start(self) -> None:
        await self.sampler.start()

    async def close(self) -> None:
        await self.sampler.close()

    def describe(self) -> str:
        return self.sampler.describe()

    def sample(self, request: SampleRequest) -> SampleStream:
        return self.sampler.sample(replace(request, line=self.line))

    async def score(self, request: ScoreRequest) -> Scores:
        return await self.sampler.score(request)

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        await self.sampler.publish(version, policy, candidate=candidate, line=self.line)

    def promote(self, version: int) -> None:
        self.sampler.promote(version)

    def retract(self, version: int) -> None:
        self.sampler.retract(version)

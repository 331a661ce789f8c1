"""Engines without a model: they follow a script, as fast or as slowly as a test needs."""

import asyncio
import inspect
import json
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from openclaw_rl.engines.base import (
    EngineStats,
    EngineUnavailable,
    LearnerCapabilities,
    PolicyRef,
    QueueFull,
    SamplerCapabilities,
    StepRefused,
    StepResult,
    WeightForm,
    policy_in,
)
from openclaw_rl.engines.serving import Admission, PolicyVersions
from openclaw_rl.engines.transaction import check_move
from openclaw_rl.types import (
    BASE_VERSION,
    FinishReason,
    SampledToken,
    SampleRequest,
    ScoreRequest,
    Scores,
    TrainingSequence,
)


def even_scores(request: ScoreRequest) -> list[float]:
    return [-0.5] * request.last_n


class ScriptedSampler:
    """Implements `Sampler`. `script(request, index)` gives the ids of each completion, end token included.

    The script sees the version that answers. `scores(request)` gives log-probs; what it raises is raised.
    """

    capabilities = SamplerCapabilities(loads=frozenset(WeightForm), scores_targets=False)

    def __init__(
        self,
        script: Callable[[SampleRequest, int], Sequence[int]],
        *,
        seconds_per_token: float = 0.0,
        max_context: int = 4096,
        max_sequences: int = 64,
        max_queue: int = 0,
        versions: Sequence[int] = (),
        policies: int = 4,
        scores: Callable[[ScoreRequest], list[float]] = even_scores,
    ) -> None:
        self.script, self.seconds_per_token, self.scores = script, seconds_per_token, scores
        self.admission = Admission(max_sequences, max_queue)
        self.limits = self.admission.limits(max_context)
        self.versions = PolicyVersions[PolicyRef | None](policies)
        for version in (BASE_VERSION, *versions):
            self.versions.add(version, None)
        self.requests: list[SampleRequest] = []
        self.scored: list[ScoreRequest] = []
        self.full = False
        self.dies_after: int | None = None
        self.closed = False
        self.sent = 0
        #: It waits before it draws more tokens than these.
        self.may_send = math.inf
        self.open = 0

    @property
    def newest_version(self) -> int:
        return self.versions.newest

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.closed = True

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        self.capabilities.check_loads(policy)
        async with self.versions.publishing(version):
            self.versions.evict()
            self.versions.add(version, policy, candidate=candidate)

    def promote(self, version: int) -> None:
        self.versions.promote(version)

    def retract(self, version: int) -> None:
        self.versions.retract(version)

    def describe(self) -> str:
        return "a sampler that draws what a test wants"

    def stats(self) -> EngineStats:
        return EngineStats(not self.closed, self.admission.outstanding, 0, 0)

    def sample(self, request: SampleRequest) -> "ScriptedStream":
        if self.full:
            raise QueueFull(7, retry_after=3)
        self.check_open()
        self.admission.check(request)
        version, _ = self.versions.find(request.version)
        self.requests.append(request)
        return ScriptedStream(self, replace(request, version=version), version)

    async def score(self, request: ScoreRequest) -> Scores:
        self.check_open()
        self.limits.check_fits(request)
        self.versions.find(request.version)
        self.scored.append(request)
        return Scores(self.scores(request))

    def check_open(self) -> None:
        if self.closed:
            raise EngineUnavailable("The sampler is closed.")


class ScriptedStream:
    """Sample one token of every completion at a time."""

    def __init__(self, sampler: ScriptedSampler, request: SampleRequest, version: int) -> None:
        self.version, self.cached_tokens = version, 0
        self._sampler, self._request = sampler, request
        self._ids = {index: list(sampler.script(request, index)) for index in range(request.n)}
        sampler.open += 1
        sampler.admission.enter(self, request.priority)
        self._closed = False

    @property
    def running(self) -> int:
        return len(self._ids)

    def drop(self, index: int) -> None:
        self._ids.pop(index, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._sampler.open -= 1
            self._sampler.admission.leave(self)
            self._ids.clear()

    async def __aiter__(self) -> AsyncIterator[list[SampledToken]]:
        position = 0
        while self._ids:
            if self._sampler.seconds_per_token:
                await asyncio.sleep(self._sampler.seconds_per_token)
            while self._sampler.sent >= self._sampler.may_send:
                await asyncio.sleep(0.001)
            self._sampler.check_open()
            if self._sampler.dies_after is not None and position >= self._sampler.dies_after:
                raise EngineUnavailable("The worker died.")
            if tokens := [self._token(index, position) for index in list(self._ids)]:
                yield tokens
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


class ScriptedLearner:
    """Implements `Learner`. Its policy is the list of the batches that it was trained on, each a list of turns.

    `hooks` are called by the name of a call, and may raise. After EngineUnavailable the policy is lost, as when a
    process dies: the next call sees an untrained policy.
    """

    capabilities = LearnerCapabilities(writes=frozenset([WeightForm.PEFT]))

    def __init__(self) -> None:
        self.policy: list[list[int]] = []
        self.before: list[list[int]] | None = None
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.calls: list[str] = []
        self.result = StepResult(0.5, 0.125, 0.01, 0.02, 1.5, tokens=100, response_tokens=10, seconds=0.25)
        self.max_kl = math.inf
        self.stopped = asyncio.Event()
        self.is_paused = False

    async def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append(name)
        try:
            answer = self.hooks[name](*arguments) if name in self.hooks else None
            if inspect.isawaitable(answer):
                await answer
        except EngineUnavailable:
            self.policy, self.before = [], None
            raise

    def describe(self) -> str:
        return "a scripted learner"

    async def start(self) -> None:
        await self._call("start")

    async def close(self) -> None: ...

    async def reset(self) -> None:
        await self._call("reset")
        self.policy, self.before = [], None

    async def step(self, sequences: Sequence[TrainingSequence]) -> StepResult:
        self.before = None
        await self._call("step", sequences)
        spans = [span for sequence in sequences for span in sequence.spans]
        if not all(math.isfinite(advantage) for span in spans for advantage in span.advantages):
            raise StepRefused("the loss is not finite")
        check_move(self.result.kl_old, self.max_kl)
        batch = sorted(span.turn for span in spans)
        self.policy, self.before = [*self.policy, batch], self.policy
        return self.result

    def stop_step(self) -> None:
        self.calls.append("stop_step")
        self.stopped.set()

    def pause_step(self, *, paused: bool) -> None:
        if paused != self.is_paused:
            self.calls.append("pause" if paused else "go on")
        self.is_paused = paused

    async def undo(self) -> None:
        await self._call("undo")
        if self.before is None:
            raise StepRefused("there is no step to take back")
        self.policy, self.before = self.before, None

    async def write_policy(self, folder: Path) -> PolicyRef:
        await self._call("write_policy", folder)
        self._write(folder)
        return policy_in(folder)

    async def save(self, folder: Path, *, lasting: bool = True) -> None:
        await self._call("save" if lasting else "save_recovery", folder)
        self._write(folder)
        (folder / "learner.json").write_text("{}")

    async def load(self, folder: Path) -> None:
        await self._call("load", folder)
        try:
            self.policy, self.before = read_policy(folder), None
        except OSError as error:
            raise StepRefused(f"the checkpoint {folder} cannot be loaded: {error}") from error

    def _write(self, folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_text(json.dumps(self.policy))


def read_policy(folder: Path) -> list[list[int]]:
    """The batches that a scripted policy in a folder was trained on."""
    policy: list[list[int]] = json.loads((folder / "adapter_model.safetensors").read_text())
    return policy

"""A run directory with a learning server in it, which can be killed and started again."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from openclaw_rl.engines.base import EngineUnavailable, PolicyRef
from openclaw_rl.learn.build import serve_learned, where_to_begin
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints, Policies
from openclaw_rl.learn.guard import Guard
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.reporting import JsonLines, Prometheus, Reporter
from openclaw_rl.learn.step import LearnSettings, Phase
from openclaw_rl.ledger import groups, verdicts
from openclaw_rl.types import SampleKind, Source, State, Verdict
from support.fakes import ScriptedLearner, ScriptedSampler, read_policy
from support.methods import a_method
from support.records import Book

#: A test fails when nothing has happened for this long.
SECONDS = 30
#: Calls of one learner after which a test fails, because it would never end.
MAX_CALLS = 10_000


class PickySampler(ScriptedSampler):
    """Refuses to use a version number for two policies, as a real sampler does."""

    def __init__(self) -> None:
        super().__init__(lambda request, index: [1])
        self.latest = 0
        self.candidates: set[int] = set()
        self.served: dict[int, list[list[int]]] = {0: []}
        self.hook: Callable[[int], Any] | None = None

    @property
    def newest_version(self) -> int:
        return max(set(self.served) - self.candidates)

    @newest_version.setter
    def newest_version(self, version: int) -> None:
        pass

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        answer = self.hook(version) if self.hook else None
        if answer is not None:
            await answer
        if version <= self.latest:
            raise EngineUnavailable(f"Policy version {version} is not newer than {self.latest}.")
        self.latest = version
        if candidate:
            self.candidates.add(version)
        self.served[version] = read_policy(policy.folder)

    def promote(self, version: int) -> None:
        self.candidates.discard(version)

    def retract(self, version: int) -> None:
        self.served.pop(version, None)
        self.candidates.discard(version)


class Examiner:
    """A gate with scripted scores."""

    margin = 0.1

    def __init__(self, mark: Callable[[int], float]) -> None:
        self.mark = mark
        self.examined: list[int] = []

    async def examine(self, version: int) -> float:
        self.examined.append(version)
        return self.mark(version)


class LearningRun:
    """A run directory and the server in it, which can be killed and started again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.book = Book(folder)
        self.settings = {"batch_size": 2, "max_steps": 1000, "max_staleness": 8, "save_interval": 2, **settings}
        self.settings.setdefault("batch_timeout", None)
        self.settings = {"first_pause": 0.01, "longest_pause": 0.02, "idle_seconds": 0.05, **self.settings}
        # Tests that are about something else save at the interval alone, whatever a save costs on this machine.
        self.settings.setdefault("recovery_share", 0.0)
        self.keep = self.settings.pop("keep_checkpoints", 3)
        self.method = self.settings.pop("method", None) or a_method("rl")
        self.gate: Any = None
        self.make_sampler: Callable[[], PickySampler] = PickySampler
        self.make_guard: Callable[[LearningRun], Guard] | None = None
        self.learner = ScriptedLearner()
        self.sampler = PickySampler()
        self.registry = CollectorRegistry()
        self.threads = ThreadPoolExecutor()
        self.task: asyncio.Task[None] | None = None

    async def start(self, resume: str = "auto", *, learning: bool = True) -> "LearningRun":
        """Start a new process, which knows only the run directory."""
        self.learner, self.sampler, self.registry = ScriptedLearner(), self.make_sampler(), CollectorRegistry()
        self.threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)
        options = TrainingOptions(keep_checkpoints=self.keep, resume_from_ckpt=resume)
        self.loop = LearnLoop(
            self.book.ledger,
            self.learner,
            self.sampler,
            self.method,
            LearnSettings(**self.settings),
            Checkpoints(self.folder / "checkpoints", self.keep),
            Policies(self.folder / "policies", 6),
            Reporter([JsonLines(self.folder / "metrics.jsonl"), Prometheus(self.registry)]),
            self.gate,
            guard=self.make_guard(self) if self.make_guard else None,
        )
        beginning = where_to_begin(options, self.folder)
        await self.loop.line.begin(beginning.checkpoint, of_this_run=beginning.of_this_run)
        if learning:
            self.learn()
        return self

    async def serve_only(self) -> int:
        """Start a new process that does not learn; the version that it serves."""
        self.sampler, self.threads = PickySampler(), ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)
        await serve_learned(TrainingOptions(), self.folder, self.folder, self.sampler)
        return self.sampler.newest_version

    def learn(self) -> None:
        self.task = asyncio.create_task(self.loop.run())

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None
        # Threads do not outlive their process.
        self.threads.shutdown()

    async def close(self) -> None:
        await self.kill()
        self.book.close()

    def judged(self, count: int = 2, version: int | None = None, score: float = 1.0, **given: Any) -> list[int]:
        """Record turns that have been judged."""
        answered = self.sampler.newest_version if version is None else version
        numbers = []
        for _ in range(count):
            number = self.book.put(State.READY, version=answered, **given)
            assert self.book.change(verdicts.record, number, Verdict(score, Source.LLM), SampleKind.RL, "", 0)
            numbers.append(number)
        return numbers

    def states(self, numbers: list[int]) -> set[State]:
        return {self.book.state(number) for number in numbers}

    def applied(self) -> list[list[int]]:
        """The turns of each step that counts."""
        steps = self.book.rows("SELECT number, step FROM updates WHERE outcome = 'applied' ORDER BY step")
        assert len({step for _, step in steps}) == len(steps)
        return [
            [turn for (turn,) in self.book.rows(f"SELECT turn FROM update_turns WHERE number = {number} ORDER BY turn")]
            for number, _ in steps
        ]

    def outcomes(self) -> list[str]:
        return [outcome for (outcome,) in self.book.rows("SELECT outcome FROM updates ORDER BY number")]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return self.loop.line.checkpoints.all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; raise TimeoutError when nothing has happened for SECONDS."""
        seen: Any = None
        while not condition():
            assert self.task is None or not self.task.done(), "learning has ended"
            now = (self.loop.phase, self.loop.step, len(self.learner.calls), self.book.scalar("PRAGMA data_version"))
            if now != seen:
                seen, deadline = now, time.monotonic() + SECONDS
            if time.monotonic() > deadline:
                raise TimeoutError
            await asyncio.sleep(0.002)

    async def trained(self, *numbers: int) -> None:
        """Wait until turns have been trained on and no step is due, then check that everything agrees."""
        try:
            await self.until(lambda: self.states(list(numbers)) <= {State.APPLIED})
        except TimeoutError:
            found = [self.book.read(number) for number in numbers]
            left = {turn.number: (turn.state, turn.reason) for turn in found if turn.state is not State.APPLIED}
            pytest.fail(f"not trained on: {left}; {self.loop.status()}; {self.outcomes()}")
        await self.rest()
        self.check()

    async def make_steps(self, count: int) -> list[list[int]]:
        """Make steps one after the other, each on turns of the policy before it; return their turns."""
        turns = []
        for _ in range(count):
            turns.append(self.judged())
            await self.trained(*turns[-1])
        return turns

    async def rest(self) -> None:
        """Wait until no step is due. The limit is a number of calls, not a time."""
        while not self.resting():
            assert self.task is not None
            assert not self.task.done(), "learning has ended"
            assert len(self.learner.calls) < MAX_CALLS, "learning goes in circles"
            await asyncio.sleep(0.001)

    def resting(self) -> bool:
        """Whether the learner holds the last step that counts, and no other is due."""
        more = self.loop.step < self.settings["max_steps"]
        due = more and self.book.ledger.read(groups.trainable) >= self.settings["batch_size"]
        return self.loop.phase is Phase.WAITING and not due

    def check(self) -> None:
        """Check that learner, ledger, sampler and counters agree."""
        applied = self.applied()
        assert self.learner.policy == applied
        assert self.sampler.served[self.sampler.newest_version] == applied
        assert self.loop.step == len(applied)
        assert self.loop.version == self.sampler.newest_version
        turns = [turn for batch in applied for turn in batch]
        assert len(set(turns)) == len(turns), "a turn was trained on twice"
        latest = self.loop.line.checkpoints.latest()
        assert latest is None or read_policy(latest.folder) == applied[: latest.step]


@contextlib.asynccontextmanager
async def a_run(folder: Path, **settings: Any) -> AsyncIterator[LearningRun]:
    run = LearningRun(folder, **settings)
    try:
        yield run
    finally:
        await run.close()


def flat(batches: list[list[int]]) -> list[int]:
    return [turn for batch in batches for turn in batch]


async def forever(*_arguments: Any) -> None:
    await asyncio.Event().wait()


def once(error: Exception) -> Callable[..., None]:
    """A hook that raises the first time."""
    left = [error]

    def hook(*_arguments: Any) -> None:
        if left:
            raise left.pop()

    return hook


def dies(times: int = 1, when: Callable[[list[int]], bool] = lambda turns: True) -> Callable[..., None]:
    """A hook for `step` that crashes the learner this many times, on batches for which `when` holds."""
    left = [None] * times

    def hook(sequences: Any) -> None:
        if left and when([span.turn for sequence in sequences for span in sequence.spans]):
            left.pop()
            raise EngineUnavailable("The learner's process ended.")

    return hook

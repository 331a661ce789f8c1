"""Runs episodes against a server: groups of attempts at tasks, several at once, no further ahead than the server."""

import asyncio
import contextlib
import math
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from openclaw_rl.client import ServerError
from openclaw_rl.envs.base import EnvFailed, Outcome, Step, Task
from openclaw_rl.envs.connection import (
    MAX_ERROR_CHARACTERS,
    MAX_TASK_CHARACTERS,
    EpisodeAnswer,
    PolicyServer,
    Sampling,
    report,
)
from openclaw_rl.envs.host import EnvironmentHost, HostedEpisode
from openclaw_rl.envs.tally import AttemptResult, Tally
from openclaw_rl.errors import UserError

#: How many training steps the turns that wait at the server may make before no new group starts.
MAX_BATCHES_AHEAD = 2.0
#: An attempt that fails is made again this many times.
RETRIES = 1
#: How long the driver tells the server which attempts were given up when it is stopped.
FAREWELL_SECONDS = 10.0
#: An environment has no further task if it gives as many known ones in a row as are known, and at least this many.
MIN_REPEATS = 16
#: How much of an environment's name stands in the names of its sessions.
MAX_NAME_CHARACTERS = 64
STOPPED = "the rollout was stopped"


class RolloutWatcher(Protocol):
    """Is told how a rollout goes."""

    def ended(self, tally: Tally) -> None: ...
    def waiting(self, tally: Tally) -> None: ...


class Pacer:
    """Says when a group may start: while the server has at most two training steps of turns waiting."""

    def __init__(self, server: PolicyServer, tally: Tally, watch: RolloutWatcher, plan: "RolloutPlan") -> None:
        self._server, self._tally, self._watch = server, tally, watch
        self._seconds = math.inf if plan.minutes is None else 60 * plan.minutes
        self._poll_seconds = plan.poll_seconds
        self._asked = -math.inf

    async def may_start(self, *, evaluates: bool) -> bool:
        """Wait until the server keeps up; False if the time is up. An evaluation never waits."""
        while self._tally.seconds <= self._seconds:
            if evaluates or time.monotonic() < self._asked + self._poll_seconds:
                return True
            state = await self._server.queue()
            if state is not None:
                self._asked = time.monotonic()
                self._tally.version = max(self._tally.version, state.version)
                self._tally.batches_ahead = state.batches
                if state.batches <= MAX_BATCHES_AHEAD:
                    return True
                self._watch.waiting(self._tally)
            await asyncio.sleep(self._poll_seconds)
        return False


class AttemptFailed(Exception):
    """The attempt does not count, neither as success nor as failure of the policy. The message says why."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an attempt may take, and how answers are drawn."""

    max_turns: int
    turn_seconds: float
    episode_seconds: float
    sampling: Sampling
    evaluates: bool = False


@dataclass(slots=True)
class AttemptRecord:
    """What happened in an attempt."""

    answers: list[EpisodeAnswer] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outcome: Outcome | None = None
    seconds: float = 0.0

    def reward_body(self) -> dict[str, Any]:
        """The reward as the server takes it: the outcome, and the steps that have a reward or a hint of their own."""
        assert self.outcome is not None
        body: dict[str, Any] = {"reward": self.outcome.reward, "solved": self.outcome.solved}
        if self.outcome.hint:
            body["text"] = self.outcome.hint
        if steps := [
            step_body(answer.id, step)
            for answer, step in zip(self.answers, self.steps, strict=True)
            if step.reward is not None or step.hint
        ]:
            body["steps"] = steps
        return body


def step_body(answer: str, step: Step) -> dict[str, Any]:
    body: dict[str, Any] = {"id": answer}
    if step.reward is not None:
        body["reward"] = float(step.reward)
    if step.hint:
        body["text"] = step.hint
    return body


class Attempt:
    """Runs one attempt in a session of its own.

    - The assistant's messages are sent back as they were received, so the server recognises its own tokens.
    - Everything that the environment or the server does wrong raises AttemptFailed.
    - The episode is closed, whatever happened.
    """

    def __init__(self, host: EnvironmentHost, server: PolicyServer, limits: EpisodeLimits) -> None:
        self.host, self.server, self.limits = host, server, limits

    async def run(self, task: Task, session: str, seed: str) -> AttemptRecord:
        """`seed` decides how answers are drawn, together with the policy. Raises AttemptFailed and UserError."""
        began = time.monotonic()
        record = AttemptRecord()
        episode = HostedEpisode(self.host, self.limits.turn_seconds)
        limit = asyncio.timeout(self.limits.episode_seconds)
        try:
            async with limit:
                try:
                    await self._play(episode, record, task, session, random.Random(seed))
                    record.outcome = await episode.finish()
                finally:
                    await episode.close()
        except (EnvFailed, ServerError) as error:
            raise AttemptFailed(str(error)) from error
        except TimeoutError:
            if not limit.expired():
                raise
            raise AttemptFailed(f"the episode took longer than {self.limits.episode_seconds:g} seconds") from None
        record.seconds = time.monotonic() - began
        return record

    async def _play(
        self, episode: HostedEpisode, record: AttemptRecord, task: Task, session: str, draws: random.Random
    ) -> None:
        limits = self.limits
        tools, messages = await episode.start(task, session)
        while len(record.answers) < limits.max_turns:
            try:
                answer = await self.server.answer(
                    session,
                    messages,
                    tools,
                    limits.sampling,
                    seed=draws.getrandbits(31),
                    evaluates=limits.evaluates,
                    seconds=limits.turn_seconds,
                )
            except ServerError as error:
                # Before the first answer, nothing that the policy wrote can be the reason.
                if not error.is_too_long or not record.answers:
                    raise
                return
            step = await episode.step(answer.message)
            record.answers.append(answer)
            record.steps.append(step)
            if step.done:
                return
            messages += [answer.message, *step.messages]


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Which episodes are run."""

    name: str
    """The environment's name, as rewards show it."""
    split: str
    seed: int
    tasks: int
    group: int
    parallel: int
    limits: EpisodeLimits
    minutes: float | None = None
    """Start no new group after this time."""
    poll_seconds: float = 0.25
    """How often to ask the server how far it is."""
    distinct: bool = False
    """Attempt no task twice."""


class EpisodeDriver(Protocol):
    """Runs a plan. The tally is there from the start, so that a plan that is stopped still has results."""

    tally: Tally

    async def run(self) -> Tally: ...


#: Makes the driver of one plan.
MakeDriver = Callable[[PolicyServer, RolloutPlan, RolloutWatcher], EpisodeDriver]


@dataclass(frozen=True, slots=True, eq=False)
class AttemptKey:
    """One attempt: a task with its number, its group, and its number in the group."""

    task: Task
    index: int
    group: str
    number: int

    def session(self, retry: int = 0) -> str:
        """The name of its session. A retry has a session of its own."""
        return f"{self.group}-{self.number}" + "-retry" * retry


class Driver:
    """Runs a plan with an environment that follows our protocol.

    - At most `parallel` attempts run at once. The attempts of a group start one after the other.
    - No group starts while the server has more than two training steps of turns waiting; evaluations never wait.
    - An attempt that fails is made once more, in a new session; if it fails again, the server is told `error`. It is
      never recorded as a reward of 0. So is an attempt whose reward the server refuses.
    - When the driver is stopped, the server is told about every attempt of a group that has begun.
    """

    def __init__(self, host: EnvironmentHost, server: PolicyServer, plan: RolloutPlan, watch: RolloutWatcher) -> None:
        self.host, self.server, self.plan, self.watch = host, server, plan, watch
        self.tally = Tally()
        self._name = run_name(plan.name)
        #: The attempts of groups that have begun, and the session in which each is made.
        self._open: dict[AttemptKey, str] = {}
        self._pacer = Pacer(server, self.tally, watch, plan)
        self._slots = asyncio.Semaphore(plan.parallel)

    async def run(self) -> Tally:
        """Run every group. Raises UserError, also as a group of errors."""
        self.tally.start()
        try:
            async with asyncio.TaskGroup() as attempts:
                async for number, task in self._tasks():
                    if not await self._pacer.may_start(evaluates=self.plan.limits.evaluates):
                        break
                    await self._start_group(attempts, number, task)
        finally:
            self.tally.finish()
            await self._give_up()
        return self.tally

    async def _tasks(self) -> AsyncIterator[tuple[int, Task]]:
        """The tasks with their numbers. Raises UserError if the environment cannot give them."""
        plan, seconds = self.plan, self.plan.limits.turn_seconds
        seen: set[str] = set()
        number = repeats = 0
        try:
            tasks = await self.host.call(
                "tasks", lambda: iter(self.host.environment.tasks(plan.split, plan.seed)), seconds
            )
            while number < plan.tasks:
                task = await self.host.call("tasks", lambda: next(tasks, None), seconds)
                if task is None:
                    return
                if not isinstance(task, Task):
                    raise EnvFailed(f"tasks gave a {type(task).__name__} instead of a Task")
                if plan.distinct and task.id in seen:
                    repeats += 1
                    # An environment that draws its tasks repeats one now and then; this one has begun again.
                    if repeats >= max(len(seen), MIN_REPEATS):
                        self.tally.tasks_repeat = True
                        return
                    continue
                seen.add(task.id)
                yield number, task
                number, repeats = number + 1, 0
        except EnvFailed as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from None
            raise UserError(f"The environment {plan.name} gives no tasks for split {plan.split!r}: {error}.") from error

    async def _start_group(self, attempts: asyncio.TaskGroup, index: int, task: Task) -> None:
        group = f"{self._name}-{index}"
        keys = [AttemptKey(task, index, group, number) for number in range(self.plan.group)]
        self._open |= {key: key.session() for key in keys}
        self.tally.groups += 1
        for key in keys:
            await self._slots.acquire()
            attempts.create_task(self._run(key))

    async def _run(self, key: AttemptKey) -> None:
        try:
            result = await self._attempt(key)
        finally:
            self._slots.release()
        self._open.pop(key, None)
        self.tally.add(result)
        self.watch.ended(self.tally)

    async def _attempt(self, key: AttemptKey) -> AttemptResult:
        """Make an attempt, once more if it fails, and tell the server what became of it."""
        attempt = Attempt(self.host, self.server, self.plan.limits)
        # With the index: an environment with few tasks repeats them, and their answers are drawn anew.
        seed = f"{self.plan.seed}/{key.index}/{key.task.id}/{key.number}"
        error = ""
        for retry in range(RETRIES + 1):
            session = self._open[key] = key.session(retry)
            try:
                record = await attempt.run(key.task, session, f"{seed}/{retry}")
            except AttemptFailed as failure:
                error = str(failure)[:MAX_ERROR_CHARACTERS]
                if retry < RETRIES:
                    self.tally.retries += 1
                    # The failed session holds turns that nobody will reward. It is outside the group.
                    await report(self.server, session, {"task": self._task_name(key), "error": error})
            else:
                return await self._record(key, session, record)
        unrecorded = await report(self.server, session, {**self._group_body(key), "error": error})
        return AttemptResult(key.task.id, key.index, key.number, None, error=error, unrecorded=unrecorded)

    async def _record(self, key: AttemptKey, session: str, record: AttemptRecord) -> AttemptResult:
        assert record.outcome is not None
        unrecorded = await report(self.server, session, {**self._group_body(key), **record.reward_body()})
        versions = [answer.version for answer in record.answers if answer.version is not None]
        self.tally.version = max([self.tally.version, *versions])
        return AttemptResult(
            key.task.id,
            key.index,
            key.number,
            None if unrecorded else record.outcome.reward,
            solved=record.outcome.solved and not unrecorded,
            turns=len(record.answers),
            seconds=record.seconds,
            staleness=self.tally.version - versions[0] if versions else 0,
            unrecorded=unrecorded,
        )

    def _group_body(self, key: AttemptKey) -> dict[str, Any]:
        body: dict[str, Any] = {"task": self._task_name(key)}
        if self.plan.group > 1:
            body |= {"group": key.group, "group_size": self.plan.group}
        return body

    def _task_name(self, key: AttemptKey) -> str:
        name, task = f"{self.plan.name}/", key.task.id
        return (task if task.startswith(name) else name + task)[:MAX_TASK_CHARACTERS]

    async def _give_up(self) -> None:
        unfinished, self._open = self._open, {}
        await give_up(self.server, {session: self._group_body(key) for key, session in unfinished.items()})


async def give_up(server: PolicyServer, unfinished: Mapping[str, Mapping[str, Any]]) -> None:
    """Say that attempts without an end, by their session, have failed, so that no group waits for them."""
    reports = [report(server, session, {**body, "error": STOPPED}) for session, body in unfinished.items()]
    with contextlib.suppress(TimeoutError, UserError):
        async with asyncio.timeout(FAREWELL_SECONDS):
            await asyncio.gather(*reports, return_exceptions=True)


def run_name(environment: str) -> str:
    """What the names of a run's groups and sessions begin with: it can stand in an address and in a header."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", environment.rpartition("/")[2])
    return f"{name[:MAX_NAME_CHARACTERS]}-{uuid4().hex[:10]}"

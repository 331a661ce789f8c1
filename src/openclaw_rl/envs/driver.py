"""Runs episodes against a server: groups of attempts at tasks, several at once, no further ahead than the server."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from openclaw_rl.envs.attempt import Attempt, AttemptFailed, AttemptRecord, EpisodeLimits
from openclaw_rl.envs.base import EnvFailed, Task
from openclaw_rl.envs.connection import MAX_ERROR_CHARACTERS, MAX_TASK_CHARACTERS, PolicyServer, report
from openclaw_rl.envs.host import EnvironmentHost
from openclaw_rl.envs.pacing import Pacer, RolloutWatcher
from openclaw_rl.envs.tally import AttemptResult, Tally
from openclaw_rl.errors import UserError

#: An attempt that fails is made again this many times.
RETRIES = 1
#: How long the driver tells the server which attempts were given up when it is stopped.
FAREWELL_SECONDS = 10.0
#: An environment has no further task if it gives as many known ones in a row as are known, and at least this many.
MIN_REPEATS = 16
#: How much of an environment's name stands in the names of its sessions.
MAX_NAME_CHARACTERS = 64
STOPPED = "the rollout was stopped"


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
        return f"{self.group}-{self.number}" + "-again" * retry


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
        self._pacer = Pacer(server, self.tally, watch, plan.minutes)
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
        """Say that attempts without an end have failed, so that no group waits for them."""
        unfinished, self._open = self._open, {}
        if not unfinished:
            return
        reports = [
            report(self.server, session, {**self._group_body(key), "error": STOPPED})
            for key, session in unfinished.items()
        ]
        with contextlib.suppress(TimeoutError, UserError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await asyncio.gather(*reports, return_exceptions=True)


def run_name(environment: str) -> str:
    """What the names of a run's groups and sessions begin with: it can stand in an address and in a header."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", environment.rpartition("/")[2])
    return f"{name[:MAX_NAME_CHARACTERS]}-{uuid4().hex[:10]}"

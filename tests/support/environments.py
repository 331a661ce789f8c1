"""Environments for tests: one that works, and ways in which one can fail."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice
from random import Random
from typing import Any

from openclaw_rl.envs.base import Message, Outcome, Step, Task
from openclaw_rl.envs.connection import EpisodeAnswer, QueueState
from openclaw_rl.envs.tally import Tally


class GuessEpisode:
    """Asks twice, and rewards by the task's number. `faults` replaces calls by others, by name."""

    def __init__(self, task: Task, faults: dict[str, Callable[[], Any]], log: list[str], turns: int) -> None:
        self.task, self.faults, self.log, self.turns = task, faults, log, turns
        self.tools: Sequence[Message] = ()
        self.answers: list[Message] = []

    async def start(self) -> Sequence[Message]:
        await self._fault("start")
        return [{"role": "user", "content": f"Guess {self.task.id}."}]

    async def step(self, answer: Message) -> Any:
        self.answers.append(answer)
        if (fault := await self._fault("step")) is not None:
            return fault
        done = len(self.answers) >= self.turns
        return Step([{"role": "user", "content": "Again."}], reward=0.5, hint="Guess lower.", done=done)

    async def outcome(self) -> Any:
        if (fault := await self._fault("outcome")) is not None:
            return fault
        return Outcome(float(self.task.data["number"]), solved=self.task.data["number"] > 0.5, hint="Guess 7.")

    async def close(self) -> None:
        self.log.append(f"closed {self.task.id}")
        await self._fault("close")

    async def _fault(self, call: str) -> Any:
        fault = self.faults[call]() if call in self.faults else None
        return await fault if asyncio.iscoroutine(fault) else fault


class Guess:
    """Tasks with a number each."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns
        self.faults: dict[str, Callable[[], Any]] = {}
        self.log: list[str] = []
        self.sessions: list[str] = []

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        random = Random(f"{split} {seed}")
        return (Task(f"{split}-{seed}-{number}", {"number": random.random()}) for number in count())

    def open(self, task: Task) -> GuessEpisode:
        self.sessions.append(task.session)
        if "open" in self.faults:
            self.faults["open"]()
        return GuessEpisode(task, self.faults, self.log, self.turns)

    def close(self) -> None:
        self.log.append("closed")


class Repeats(Guess):
    """Has two tasks, and begins again."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return cycle(islice(super().tasks(split, seed), 2))


class LengthEpisode(GuessEpisode):
    """Rewards long answers, so that attempts at a task differ."""

    async def outcome(self) -> Outcome:
        return Outcome(float(sum(len(answer["content"] or "") for answer in self.answers)), solved=True)


class Lengths(Guess):
    """The same tasks, rewarded by the length of the answers."""

    def open(self, task: Task) -> LengthEpisode:
        return LengthEpisode(task, self.faults, self.log, self.turns)


class InstantPolicy:
    """A server without HTTP: it answers at once, and keeps the reports. Only the environment can be slow."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    async def answer(self, session: str, messages: Sequence[Message], *_: Any, **__: Any) -> EpisodeAnswer:
        return EpisodeAnswer("chatcmpl-1", {"role": "assistant", "content": "seven"}, 0)

    async def reward(self, session: str, body: dict[str, Any]) -> None:
        self.reports.append(body)

    async def queue(self) -> QueueState:
        return QueueState()


class Unwatched:
    """A watcher that does nothing."""

    def ended(self, tally: Tally) -> None: ...

    def waiting(self, tally: Tally) -> None: ...


def first_only(fault: Callable[[], Any]) -> Callable[[], Any]:
    """A fault that happens the first time alone."""
    times = count()
    return lambda: fault() if next(times) == 0 else None


def raises(error: BaseException) -> Callable[[], Any]:
    def fault() -> Any:
        raise error

    return fault


def hangs() -> Any:
    return asyncio.Event().wait()

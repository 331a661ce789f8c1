"""What an environment is: tasks, and the episodes in which a policy attempts them.

The driver asks an episode for its first messages, sends them to the server, gives each answer back to the episode, and
so on until the episode is done. Then it asks for the outcome. An environment never talks to the server itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

#: A chat message in OpenAI's shape.
Message = Mapping[str, Any]
#: A tool in OpenAI's shape: {"type": "function", "function": {...}}.
Tool = Mapping[str, Any]


class EnvFailed(Exception):
    """The environment broke: the attempt does not count, neither as success nor as failure."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something to attempt. Attempts at the same task form a group."""

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    session: str = field(default="", compare=False)
    """The session of this attempt at the task, which the driver sets: for what an environment keeps of an attempt."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment says to one answer."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    """The reward of this step alone, if the environment gives one."""
    hint: str = ""
    """What would have improved the answer, e.g. the message of an error; distillation learns from it."""
    done: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode."""

    reward: float
    solved: bool
    hint: str = ""
    """What would have improved the last answer."""


class Episode(Protocol):
    """One attempt at a task."""

    tools: Sequence[Tool]

    async def start(self) -> Sequence[Message]: ...
    async def step(self, answer: Message) -> Step: ...
    async def outcome(self) -> Outcome: ...
    async def close(self) -> None: ...


class Environment(Protocol):
    """A source of tasks. The same split and seed give the same tasks in the same order, without end."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]: ...
    def open(self, task: Task) -> Episode: ...

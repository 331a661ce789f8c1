"""A user's tools and tasks as an environment. The tasks are in a file with one JSON object a line:

    {"messages": [{"role": "user", "content": "How many words has 'a b c'?"}], "answer": 3}
    {"question": "Book a table for two.", "calls": [{"name": "book", "arguments": {"people": 2}}], "split": "held-out"}
    {"question": "Tidy the list.", "checker": "checks.py:is_tidy"}

A task has `messages` or a `question`, and at least one of `answer`, `calls` and `checker`. A checker is called with the
task, the calls that were made ({"name", "arguments", "error"}) and the final answer, and returns a reward; 1 or more
means solved. `split` is train or held-out; without it, one task in five is held out, by a digest of its messages.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, StrictStr, ValidationError, model_validator

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Task
from openclaw_rl.envs.calls import ExpectedCall
from openclaw_rl.envs.toolcall.episode import Goal, ToolEpisode
from openclaw_rl.envs.toolcall.user_config import OPTION, StrictPart, read_tools_config
from openclaw_rl.envs.toolcall.user_toolbox import UserToolbox
from openclaw_rl.lab.tasks import first_problem, in_rounds, read_json_lines, split_of, text_digest
from openclaw_rl.plugins import describe, load_plugin


class UserTools:
    """The tasks of a configuration, over and over in an order that depends on the seed."""

    def __init__(self, tools_config: str | Path) -> None:
        self._path = Path(tools_config)
        self._config = read_tools_config(self._path)
        names = [tool.function.name for tool in self._config.tools]
        self._tasks = read_tasks(self._config.tasks, names, self._config.system)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        if not self._tasks.get(split):
            raise ConfigError(f"{OPTION}: {self._config.tasks} has no task of the split {split}.")
        return in_rounds("tools", self._tasks[split], seed)

    def open(self, task: Task) -> ToolEpisode:
        data = task.data
        goal = Goal([ExpectedCall(**call) for call in data["calls"]], data["answer"])
        limits = (max(self._config.max_turns, len(goal.calls) + 1), max(self._config.max_calls, len(goal.calls) + 1))
        return UserToolsEpisode(task, UserToolbox(self._config.tools), data["messages"], goal, *limits)


class UserToolsEpisode(ToolEpisode):
    """An attempt whose task may have a checker of its own."""

    def __init__(
        self,
        task: Task,
        toolbox: UserToolbox,
        messages: Sequence[Message],
        goal: Goal,
        max_turns: int,
        max_calls: int,
    ) -> None:
        super().__init__(toolbox, messages, goal, max_turns, max_calls)
        self._task = task
        self._user_toolbox = toolbox

    async def outcome(self) -> Outcome:
        if not self._task.data["checker"]:
            return await super().outcome()
        check = load_plugin(self._task.data["checker"], OPTION, ())
        calls = [
            {"name": call.name, "arguments": call.arguments, "error": call.problem or call.failure}
            for call in self.made
        ]
        try:
            # Copies, because the other attempts at the task use the same data.
            reward = float(check(*deepcopy((dict(self._task.data), calls)), self.answer or ""))
        except Exception as error:
            raise EnvFailed(f"The checker {self._task.data['checker']} failed: {describe(error)}.") from error
        if not math.isfinite(reward):
            raise EnvFailed(f"The checker {self._task.data['checker']} gave {reward}, which is not a reward.")
        return Outcome(reward, reward >= 1)

    async def close(self) -> None:
        await self._user_toolbox.close()


class WantedCall(StrictPart):
    """A call that a task expects."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class TaskLine(StrictPart):
    """One line of the file."""

    id: str = ""
    question: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    answer: StrictStr | StrictInt | StrictFloat | None = None
    calls: list[WantedCall] = Field(default_factory=list)
    checker: str = ""
    split: Literal["train", "held-out"] | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    """Anything that a checker needs."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if bool(self.question) == bool(self.messages):
            raise ValueError("give either messages or a question")
        if self.answer is None and not self.calls and not self.checker:
            raise ValueError("give an answer, calls or a checker")
        if self.checker and (self.answer is not None or self.calls):
            raise ValueError("a checker replaces answer and calls; give one or the other")
        if any("role" not in message for message in self.messages):
            raise ValueError("each message needs a role")
        return self


def read_tasks(path: Path, tools: Sequence[str], system: str) -> dict[str, list[Task]]:
    """The tasks of each split. Raises ConfigError, which names the line."""
    tasks: dict[str, list[Task]] = {"train": [], "held-out": []}
    for place, line in read_json_lines(path, OPTION):
        try:
            task = TaskLine.model_validate(line)
        except ValidationError as error:
            raise ConfigError(f"{place}: {first_problem(error)}.") from None
        if unknown := [call.name for call in task.calls if call.name not in tools]:
            raise ConfigError(f"{place} expects a call of {unknown[0]}, which is not one of the tools.")
        checker = _checker(task.checker, path.parent, place) if task.checker else ""
        made = _task(task, checker, system)
        tasks[made.data["split"]].append(made)
    if not any(tasks.values()):
        raise ConfigError(f"{OPTION}: {path} has no tasks.")
    return tasks


def _checker(given: str, folder: Path, place: str) -> str:
    file, _, name = given.partition(":")
    if not name:
        raise ConfigError(f"{place}: a checker is path/file.py:name or package.module:name.")
    given = f"{folder / file}:{name}" if file.endswith(".py") else given
    if not callable(load_plugin(given, place, ())):
        raise ConfigError(f"{place}: the checker {name} is not a function.")
    return given


def _task(line: TaskLine, checker: str, system: str) -> Task:
    messages: list[Mapping[str, Any]] = list(line.messages) or [{"role": "user", "content": line.question}]
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    written = json.dumps(line.messages or line.question, sort_keys=True)
    digest = text_digest(written)
    split = line.split or split_of(digest)
    data = line.model_dump() | {"messages": messages, "split": split, "checker": checker}
    return Task(f"tools/{split}/{line.id or f'{digest:016x}'}", data)

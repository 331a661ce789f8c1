"""Tasks for a user's own tools, from a file with one JSON object a line:

    {"messages": [{"role": "user", "content": "How many words has 'a b c'?"}], "answer": 3}
    {"question": "Book a table for two.", "calls": [{"name": "book", "arguments": {"people": 2}}], "split": "held-out"}
    {"question": "Tidy the list.", "checker": "checks.py:is_tidy"}

A task has `messages` or a `question`, and at least one of `answer`, `calls` and `checker`. A checker is called with the
task, the calls that were made ({"name", "arguments", "error"}) and the final answer, and returns a reward; 1 or more
means solved. `split` is train or held-out; without it, one task in five is held out, by a digest of its messages.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, StrictFloat, StrictInt, StrictStr, ValidationError, model_validator

from openclaw_rl.config.options import ConfigError, read_text
from openclaw_rl.envs.base import Task
from openclaw_rl.envs.toolcall.own.config import OPTION, StrictPart
from openclaw_rl.plugins import load_plugin

#: One task of so many is held out, where the file does not say which.
HELD_OUT_ONE_IN = 5


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
    for number, line in enumerate(read_text(path, OPTION).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{OPTION}: {path}, line {number}"
        try:
            task = TaskLine.model_validate_json(line)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            said = problem["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{place}: {where}{': ' if where else ''}{said}.") from None
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
    digest = int.from_bytes(hashlib.blake2b(written.encode(), digest_size=8).digest(), "big")
    split = line.split or ("train" if digest % HELD_OUT_ONE_IN else "held-out")
    data = line.model_dump() | {"messages": messages, "split": split, "checker": checker}
    return Task(f"tools/{split}/{line.id or f'{digest:016x}'}", data)

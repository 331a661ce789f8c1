"""Tasks on any page: its address, what is asked, and a JavaScript expression that checks it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Task
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.page import WebPage
from openclaw_rl.envs.browser.scenes import Scene, value_of
from openclaw_rl.envs.browser.site_tasks import MAX_EXAMPLES, site_examples
from openclaw_rl.lab.tasks import SPLITS, checked_examples, digest, in_rounds, read_json_lines, split_of

MAX_STEPS = 15
FIELDS = ("url", "goal", "check")


class Addresses:
    """Tasks of a file, or the one that the arguments give. The tasks of a split repeat in a new order without end."""

    def __init__(self, lines: list[Mapping[str, Any]], examples: Any = 2) -> None:
        self._tasks: dict[str, list[Task]] = {split: [] for split in SPLITS}
        for number, line in enumerate(lines, 1):
            split, task = checked_line(line, number)
            # A single task is all that there is, for both splits.
            for one in SPLITS if len(lines) == 1 else (split,):
                self._tasks[one].append(task)
        self._examples = checked_examples("browser", examples, MAX_EXAMPLES)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        tasks = self._tasks.get(split)
        if not tasks:
            raise ConfigError(f"There is no task for the split {split}.")
        return in_rounds(f"addresses {split}", tasks, seed)

    def scene(self, task: Task, chromium: Chromium) -> "AddressScene":
        return AddressScene(task.data, chromium)

    def examples(self, task: Task, *, offers_tool: bool) -> list[Message]:
        """Examples of a built-in site: they show what an action looks like."""
        return site_examples("shop", 1, self._examples, offers_tool=offers_tool)


class AddressScene(Scene):
    """A page of somebody else. It is over when its check gives true, or 1 or more."""

    def __init__(self, data: Mapping[str, Any], chromium: Chromium) -> None:
        super().__init__(chromium, data["url"], None, data.get("max_steps", MAX_STEPS))
        self._data = data

    async def goal(self, page: WebPage) -> str:
        return str(self._data["goal"])

    async def over(self, page: WebPage) -> bool:
        return await self._checked(page) >= 1

    async def outcome(self, page: WebPage) -> Outcome:
        reward = await self._checked(page)
        return Outcome(reward, reward >= 1)

    async def _checked(self, page: WebPage) -> float:
        value = await value_of(page, self._data["check"])
        if not isinstance(value, bool | int | float):
            raise EnvFailed(f"the check must give true, false or a number, not {value!r:.60}")
        return float(value)


def read_lines(path: Path) -> list[Mapping[str, Any]]:
    """The tasks of a file, one JSON object on each line. Raises ConfigError."""
    lines = [line for _, line in read_json_lines(path, "--env-arg tasks")]
    if not lines:
        raise ConfigError(f"{path} has no task.")
    return lines


def checked_line(line: Any, number: int) -> tuple[str, Task]:
    """A task and its split. Raises ConfigError."""
    if not isinstance(line, dict) or not all(isinstance(line.get(name), str) and line[name] for name in FIELDS):
        raise ConfigError(f"Task {number} needs {', '.join(FIELDS)}, each a text.")
    parts = urlsplit(line["url"])
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"Task {number}: the address must begin with http:// or https://, not {line['url']!r:.80}.")
    if parts.username or parts.password:
        raise ConfigError(f"Task {number}: the address must not contain a user name or a password.")
    steps = line.get("max_steps", MAX_STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"Task {number}: max_steps must be a number from 1 on, not {steps!r:.40}.")
    task_number = digest({name: line[name] for name in FIELDS})
    split = line.get("split") or split_of(task_number)
    if split not in SPLITS:
        raise ConfigError(f"Task {number}: the splits are {' and '.join(SPLITS)}, not {split}.")
    return split, Task(f"browser/{split}/{parts.hostname}-{task_number:016x}", dict(line))

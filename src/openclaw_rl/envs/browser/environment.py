"""The environment `browser`: tasks on web pages, done in Chromium: built-in sites, MiniWoB++, and any other address."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Task
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.episode import BrowserEpisode, ScreenshotFolder, writable_folder
from openclaw_rl.envs.browser.miniwob import MiniWob
from openclaw_rl.envs.browser.scenes import Scene, value_of
from openclaw_rl.envs.browser.site_tasks import MAX_EXAMPLES, SiteTasks, site_examples
from openclaw_rl.envs.browser.tab import ChromiumPage
from openclaw_rl.lab.tasks import SPLITS, checked_examples, digest, in_rounds, read_json_lines, split_of

#: The variable by which the published scripts choose what drives the browser, and the only choice.
DRIVER_VARIABLE = "SCREENSHOT_BACKEND"
DRIVER = "playwright"


class TaskSource(Protocol):
    """Where tasks on pages come from."""

    def tasks(self, split: str, seed: int) -> Iterator[Task]: ...
    def scene(self, task: Task, chromium: Chromium) -> Scene: ...
    def examples(self, task: Task, *, offers_tool: bool) -> list[Message]: ...


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """How pages are shown to the model, and what is kept of them."""

    offers_tool: bool = False
    images: bool = False
    screenshots: Path | None = None


class BrowserEnvironment:
    """Tasks on web pages. Each episode has a browser context of its own: cookies, storage and a way out of its own."""

    def __init__(self, source: TaskSource, chromium: Chromium, show: ShowOptions) -> None:
        self.about = chromium.about
        self._source = source
        self._chromium = chromium
        self._show = show

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return self._source.tasks(split, seed)

    def open(self, task: Task) -> BrowserEpisode:
        show = self._show
        return BrowserEpisode(
            self._source.scene(task, self._chromium),
            self._source.examples(task, offers_tool=show.offers_tool),
            offers_tool=show.offers_tool,
            images=show.images,
            record=ScreenshotFolder(show.screenshots, task.session or task.id) if show.screenshots else None,
        )

    async def close(self) -> None:
        await self._chromium.close()


def make_browser(
    pages: Any = None,
    levels: Any = None,
    examples: Any = 2,
    miniwob: Any = None,
    url: str | None = None,
    goal: str | None = None,
    check: str | None = None,
    tasks: str | None = None,
    tool: bool = False,
    images: bool = False,
    screenshots: str | None = None,
) -> BrowserEnvironment:
    """The environment of the given settings; the docs say what they mean. Raises ConfigError."""
    if (driver := os.environ.get(DRIVER_VARIABLE) or DRIVER) != DRIVER:
        raise ConfigError(f"{DRIVER_VARIABLE}={driver} is not supported: the browser is driven by {DRIVER}.")
    for name, value in (("tool", tool), ("images", images)):
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is true or false, not {value!r:.40}.")
    address = {name: value for name, value in (("url", url), ("goal", goal), ("check", check)) if value is not None}
    sites = {name: value for name, value in (("pages", pages), ("levels", levels)) if value is not None}
    source = make_tasks(sites, miniwob, address, tasks, examples)
    folder = writable_folder(screenshots) if screenshots else None
    return BrowserEnvironment(source, Chromium(), ShowOptions(tool, images, folder))


def make_tasks(
    sites: dict[str, Any], miniwob: Any, address: dict[str, Any], file: str | None, examples: Any
) -> TaskSource:
    """Where tasks come from: the built-in sites, unless the arguments name others. Raises ConfigError."""
    kinds = [("pages and levels", sites), ("miniwob", miniwob), ("url, goal and check", address), ("tasks", file)]
    given = [name for name, value in kinds if value]
    if len(given) > 1:
        raise ConfigError(f"Give browser either {given[0]} or {given[1]}: they are different tasks.")
    if miniwob:
        return MiniWob(miniwob, examples)
    if address:
        return Addresses([address], examples)
    if file:
        return Addresses(read_lines(Path(file).expanduser()), examples)
    return SiteTasks(**sites, examples=examples)


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

    async def goal(self, page: ChromiumPage) -> str:
        return str(self._data["goal"])

    async def over(self, page: ChromiumPage) -> bool:
        return await self._checked(page) >= 1

    async def outcome(self, page: ChromiumPage) -> Outcome:
        reward = await self._checked(page)
        return Outcome(reward, reward >= 1)

    async def _checked(self, page: ChromiumPage) -> float:
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

"""The environment `browser`: tasks on web pages, done in Chromium."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.browser.addresses import Addresses, read_lines
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.episode import BrowserEpisode, ScreenshotFolder, writable_folder
from openclaw_rl.envs.browser.miniwob import MiniWob
from openclaw_rl.envs.browser.scenes import Scene
from openclaw_rl.envs.browser.site_tasks import SiteTasks

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

    def __init__(self, source: TaskSource, chromium: Chromium, show: ShowOptions | None = None):
        self.about = chromium.about
        self._source = source
        self._chromium = chromium
        self._show = show or ShowOptions()

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

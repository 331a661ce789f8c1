"""Policies for the environment browser, and a browser that shows the built-in sites without Chromium."""

from collections.abc import Sequence
from typing import Any

from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.environment import BrowserEnvironment, ShowOptions
from openclaw_rl.envs.browser.episode import BrowserEpisode
from openclaw_rl.envs.browser.errors import PageFailed
from openclaw_rl.envs.browser.scenes import SiteScene
from openclaw_rl.envs.browser.site_pages import ModelPage, SitePage
from openclaw_rl.envs.browser.site_tasks import FAMILIES, SiteTasks
from openclaw_rl.envs.browser.tab import ChromiumPage
from openclaw_rl.envs.browser.view import PageElement, PageView
from support.policies import Policy, says


class NoBrowser:
    """A browser that must not be asked."""

    about = ""

    async def open(self, proxy: str) -> Any:
        raise AssertionError("a browser was asked for")

    async def close(self) -> None: ...


class ModelTab(ModelPage):
    """A tab without a browser."""

    async def look(self) -> PageView:
        return self.view()

    async def perform(self, action: BrowserAction, element: PageElement | None) -> None:
        self.act(action, element)

    async def evaluate(self, expression: str) -> Any:
        raise PageFailed("There is no JavaScript here.")

    async def screenshot(self) -> bytes:
        raise PageFailed("There is nothing to draw here.")

    def notes(self) -> list[str]:
        return []

    async def close(self) -> None:
        """Nothing to close."""


class ModelScene(SiteScene):
    """A built-in site, shown without a browser."""

    async def open(self) -> ChromiumPage:
        return ModelTab(self._site)


class ModelPages(SiteTasks):
    """The built-in sites without a browser."""

    def scene(self, task: Task, chromium: Any) -> ModelScene:
        return ModelScene(FAMILIES[task.data["family"]](task.data["content"]), task.data, chromium)


TEXT_ALONE = ShowOptions()


def without_browser(show: ShowOptions = TEXT_ALONE, **settings: Any) -> BrowserEnvironment:
    return BrowserEnvironment(ModelPages(**settings), NoBrowser(), show=show)


class BlankSite:
    """A site whose pages a test gives by their path."""

    over = False

    def __init__(self, pages: dict[str, SitePage]) -> None:
        self.pages = pages
        self.posted: list[tuple[str, dict[str, str]]] = []

    def get(self, path: str) -> SitePage:
        return self.pages.get(path, self.pages["/"])

    def post(self, path: str, fields: Any) -> str:
        self.posted.append((path, dict(fields)))
        return path


def oracle(task: Task, episode: BrowserEpisode) -> Policy:
    """Does the moves of the solution, by what the page shows at that moment."""

    def answer(messages: Sequence[Message], turn: int) -> Message:
        kind, role, name, text = task.data["solution"][turn]
        number = episode.view.number(role, name)
        assert number is not None, f"the page has no {role} {name}: {episode.view.text()}"
        return says(f"{kind} {number} {text}".strip())

    return answer


def does_nothing(messages: Sequence[Message], turn: int) -> Message:
    return says("done")


def says_nothing(messages: Sequence[Message], turn: int) -> Message:
    return says("")


def destroys_everything(episode: BrowserEpisode) -> Policy:
    """Uses every element that the page has, the destructive ones first."""

    def answer(messages: Sequence[Message], turn: int) -> Message:
        names = [element.name for element in episode.view.elements]
        worst = [index for index, name in enumerate(names, 1) if name.startswith(("Delete", "Clear", "Empty", "Add"))]
        choice = worst or list(range(len(names), 0, -1))
        return says(f"click {choice[turn % len(choice)]}")

    return answer

"""A built-in site: it answers requests with pages, remembers what was done, and scores it.

`ModelPage` shows its pages without a browser.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.page import PageFailed
from openclaw_rl.envs.browser.sites.parts import (
    ChoiceField,
    Page,
    PageForm,
    PageLink,
    SendButton,
    TextField,
)
from openclaw_rl.envs.browser.view import PageElement, PageView

#: A share of the parts that are right never counts as much as solving the task.
MOST_PARTIAL = 0.8
SURNAMES = (
    *("Adler", "Brandt", "Cole", "Diaz", "Evans", "Frost", "Gray", "Holt"),
    *("Ito", "Jensen", "Klein", "Lund", "Moss", "Nagy", "Otto", "Park"),
)


@dataclass(frozen=True, slots=True)
class SiteMove:
    """One step of a solution: an action on the element with a role and a name."""

    kind: str
    role: str
    name: str
    text: str = ""

    def as_list(self) -> list[str]:
        return [self.kind, self.role, self.name, self.text]


@dataclass(frozen=True, slots=True)
class SiteDraft:
    """A task of a site: what is asked, what the site contains, and how it is solved."""

    goal: str
    content: Mapping[str, Any]
    solution: Sequence[SiteMove]


class Site(Protocol):
    """One attempt's site."""

    @property
    def over(self) -> bool:
        """Whether the last action ended the attempt, for example by sending the order."""
        ...

    def get(self, path: str) -> Page:
        """The page at a path; the first page for a path that is not known."""
        ...

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        """Take what a form sends; the path of the page that follows."""
        ...

    def outcome(self) -> Outcome: ...


class SiteFamily(Protocol):
    """A kind of site: it draws tasks, and makes the site of a task from its content."""

    def draw(self, random: Random, level: int) -> SiteDraft: ...
    def site(self, content: Mapping[str, Any]) -> Site: ...


def share_right(problems: Sequence[str], checks: int, *, ended: bool) -> Outcome:
    """The outcome where `checks` things had to be right, and these were not."""
    if not problems and ended:
        return Outcome(1.0, solved=True)
    if not ended:
        problems = [*problems, "The last step is missing."]
    reward = MOST_PARTIAL * max(checks - len(problems), 0) / checks if ended else 0.0
    return Outcome(reward, solved=False, hint=" ".join(problems[:3]))


class ModelPage:
    """A tab that shows a site's pages as they were made. Examples are made with it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._history = ["/"]
        self._page: Page = site.get("/")
        self._filled: dict[str, str] = {}

    async def look(self) -> PageView:
        return self.view()

    def view(self) -> PageView:
        return PageView(self._page.lines(self._filled))

    async def perform(self, action: BrowserAction, element: PageElement | None) -> None:
        self.act(action, element)

    def act(self, action: BrowserAction, element: PageElement | None) -> None:
        """Raises PageFailed."""
        if action.kind == "back":
            if len(self._history) < 2:
                raise PageFailed("There is no page to go back to.")
            self._history.pop()
            self._show(self._history[-1])
        if element is None:
            return
        widget, form = self._page.targets()[element.node]
        match action.kind, widget:
            case "click", PageLink(_, path):
                self._history.append(path)
                self._show(path)
            case "click", SendButton(_, name, value):
                assert form is not None
                path = self._site.post(form.path, {**self._values(form), name: value})
                self._history.append(path)
                self._show(path)
            case "type", TextField(_, name):
                self._filled[name] = action.text
            case "select", ChoiceField(_, name, options):
                if action.text not in options:
                    raise PageFailed("There is no such option.")
                self._filled[name] = action.text
            case "type", _:
                raise PageFailed("Nothing can be typed into this element.")
            case "select", _:
                raise PageFailed("This element has no options to select.")

    async def evaluate(self, expression: str) -> Any:
        raise PageFailed("There is no JavaScript here.")

    async def screenshot(self) -> bytes:
        raise PageFailed("There is nothing to draw here.")

    def notes(self) -> list[str]:
        return []

    async def close(self) -> None:
        """Nothing to close."""

    def _show(self, path: str) -> None:
        self._page = self._site.get(path)
        self._filled = {}

    def _values(self, form: PageForm) -> dict[str, str]:
        """What a form sends, without its buttons."""
        values: dict[str, str] = {}
        for widget in form.widgets:
            values |= self._sent(widget)
        return values

    def _sent(self, widget: Any) -> dict[str, str]:
        match widget:
            case TextField(_, name, value) | ChoiceField(_, name, _, value):
                return {name: self._filled.get(name, value)}
            case _:
                return {}


def solve(page: ModelPage, solution: list[list[str]]) -> list[tuple[str, BrowserAction]]:
    """Do the moves of a solution; what the page showed before each, and the action."""
    turns = []
    for kind, role, name, text in solution:
        view = page.view()
        number = view.number(role, name)
        assert number is not None, f"the page has no {role} {name}"
        action = BrowserAction(kind, number, text)
        turns.append((view.text(), action))
        page.act(action, view.element(number))
    return turns

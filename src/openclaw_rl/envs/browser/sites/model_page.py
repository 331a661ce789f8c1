"""A site's pages without a browser: what Chromium would show, and what actions would do."""

from typing import Any

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
from openclaw_rl.envs.browser.sites.site import Site
from openclaw_rl.envs.browser.view import PageElement, PageView


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

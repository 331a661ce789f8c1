"""What an episode needs of a page, whatever shows it."""

from typing import Any, Protocol

from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.view import PageElement, PageView


class BrowserGone(EnvFailed):
    """The browser died, or the page crashed: the attempt does not count."""


class PageFailed(Exception):
    """The page does not do what was asked, or does not respond; the message is for the model."""


class WebPage(Protocol):
    """A page in a tab. Every call ends within seconds, whatever the page does."""

    async def look(self) -> PageView:
        """What the page shows. Raises PageFailed and BrowserGone."""
        ...

    async def perform(self, action: BrowserAction, element: PageElement | None) -> None:
        """Do an action and wait for what follows from it. Raises PageFailed and BrowserGone."""
        ...

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page. Raises PageFailed and BrowserGone."""
        ...

    async def screenshot(self) -> bytes:
        """The visible part as PNG. Raises PageFailed and BrowserGone."""
        ...

    def notes(self) -> list[str]:
        """What happened since the last call: dialogs, refused requests, closed windows."""
        ...

    async def close(self) -> None: ...


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return (lines[0][:300] if lines else type(error).__name__).rstrip(".")

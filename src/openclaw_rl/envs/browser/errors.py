"""What can go wrong with a page."""

from openclaw_rl.envs.base import EnvFailed


class BrowserGone(EnvFailed):
    """The browser died, or the page crashed: the attempt does not count."""


class PageFailed(Exception):
    """The page does not do what was asked, or does not respond; the message is for the model."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return (lines[0][:300] if lines else type(error).__name__).rstrip(".")

"""Which library drives Chromium."""

import importlib.util
import os
from typing import Protocol

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.browser.chromium.find import find_chromium, has_own_sandbox
from openclaw_rl.envs.browser.chromium.tab import DevtoolsSession

VARIABLE = "SCREENSHOT_BACKEND"
BACKENDS = ("playwright", "selenium")
EXTRA = {
    "playwright": "pip install 'openclaw-rl[browser]'",
    "selenium": "pip install selenium",
}


class BrowserBackend(Protocol):
    """Opens tabs, each with cookies and storage of its own, and starts the browser again when it has died."""

    async def open(self, proxy: str) -> DevtoolsSession:
        """A tab whose only way out is a proxy. Raises BrowserGone."""
        ...

    async def close(self) -> None: ...


def make_backend(name: str | None = None) -> tuple[BrowserBackend, str]:
    """The backend of a name, and a line about it. Nothing is started yet. Raises ConfigError."""
    name = name or os.environ.get(VARIABLE) or BACKENDS[0]
    if name not in BACKENDS:
        raise ConfigError(f"The browser's backend is {' or '.join(BACKENDS)}, not {name}.")
    if importlib.util.find_spec(name) is None:
        raise ConfigError(f"The environment browser needs the package {name}: {EXTRA[name]}")
    executable = find_chromium()
    fence = "with its own sandbox" if has_own_sandbox() else "without its own sandbox, because it is started by root"
    about = f"{executable} {fence}, driven by {name}"
    if name == "selenium":
        from openclaw_rl.envs.browser.chromium.selenium_tabs import SeleniumBackend, find_driver

        return SeleniumBackend(executable, find_driver()), about
    from openclaw_rl.envs.browser.chromium.playwright_tabs import PlaywrightBackend

    return PlaywrightBackend(executable), about

"""Chromium, driven by Playwright: where it is, how it is started, and a context of its own for each tab."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.browser.errors import BrowserGone, PageFailed, first_line
from openclaw_rl.envs.browser.view import quoted

#: The variable that names Chromium, and the names that it is looked for by.
VARIABLE = "CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"The environment browser needs Chromium: install it (Debian: apt install chromium), or set {VARIABLE} to it."
PACKAGE = "playwright"
MISSING_PACKAGE = f"The environment browser needs the package {PACKAGE}: pip install 'openclaw-rl[browser]'"
#: The memory that the scripts of a page may take, in MiB; a page that wants more crashes.
MAX_SCRIPT_MIB = 512
#: Nothing is looked up by name, nothing goes past the proxy, and nothing waits for a small /dev/shm.
FLAGS = (
    f"--js-flags=--max-old-space-size={MAX_SCRIPT_MIB}",
    "--disable-dev-shm-usage",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
VIEWPORT = (800, 600)
#: How long the browser may take to start, to open a tab, and to close one.
START_SECONDS = 60.0
OPEN_SECONDS = 30.0
CLOSE_SECONDS = 8.0
#: A browser that has shown so many tabs is replaced by a new one, so that nothing in it grows without end.
MAX_TABS = 400
#: Windows and notes of one tab that are remembered.
MAX_REMEMBERED = 20
#: A page that was asked for begins to load within this time, or it never does.
BEGIN_SECONDS = 1.5
#: The events of Chromium's DevTools protocol that say whether a tab loads.
REQUESTED = "Page.frameRequestedNavigation"
STARTED = "Page.frameStartedLoading"
STOPPED = "Page.frameStoppedLoading"
DETACHED = "Page.frameDetached"
EVENTS = (REQUESTED, STARTED, STOPPED, DETACHED)


def find_chromium() -> str:
    """The path of Chromium. Raises ConfigError."""
    if given := os.environ.get(VARIABLE):
        if found := shutil.which(given):
            return found
        raise ConfigError(f"{VARIABLE}={given} is not a program.")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise ConfigError(MISSING)
    return found


def has_own_sandbox() -> bool:
    """Whether Chromium's own sandbox can be used: it refuses to run with it as root."""
    return os.geteuid() != 0


class LoadingState:
    """Which frames of a tab load or are about to.

    Chromium tells that a page was asked for before it answers a later command. So a tab that loads nothing after an
    action and one more command loads nothing because of that action.
    """

    def __init__(self) -> None:
        self._requested: dict[str, float] = {}
        self._loading: set[str] = set()

    def read(self, event: str, params: Mapping[str, Any]) -> None:
        frame = str(params.get("frameId", ""))
        if event == REQUESTED and params.get("disposition", "currentTab") == "currentTab":
            self._requested[frame] = time.monotonic()
        elif event == STARTED:
            self._requested.pop(frame, None)
            self._loading.add(frame)
        elif event in (STOPPED, DETACHED):
            self._requested.pop(frame, None)
            self._loading.discard(frame)

    @property
    def loads(self) -> bool:
        oldest = time.monotonic() - BEGIN_SECONDS
        return bool(self._loading) or any(since > oldest for since in self._requested.values())


@dataclass(eq=False)
class RunningBrowser:
    """A browser process, and how many tabs it shows."""

    playwright: Any
    browser: Any
    loop: asyncio.AbstractEventLoop
    tabs: int = 0
    opened: int = 0
    stale: bool = False
    """It gets no further tabs, and is closed with its last one."""

    @property
    def usable(self) -> bool:
        alive = self.browser.is_connected() and self.loop is asyncio.get_running_loop()
        return alive and not self.stale and self.opened < MAX_TABS

    async def stop(self) -> None:
        for close in (self.browser.close, self.playwright.stop):
            # Whatever goes wrong here, the processes are dying or dead.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await close()


class Chromium:
    """Opens tabs in one shared browser, each with cookies and storage of its own. Nothing is started before the first.

    - A browser that died, or whose tab cannot be closed, gets no further tabs: the next tab starts a new one.
    - A browser without tabs that gets no further ones is closed.
    """

    def __init__(self) -> None:
        """Raises ConfigError if Chromium or Playwright is missing."""
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(MISSING_PACKAGE)
        self._executable = find_chromium()
        fence = (
            "with its own sandbox" if has_own_sandbox() else "without its own sandbox, because it is started by root"
        )
        self.about = f"{self._executable} {fence}"
        self._running: RunningBrowser | None = None
        self._lock: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    async def open(self, proxy: str) -> "ChromiumTab":
        """A tab whose only way out is a proxy. Raises BrowserGone."""
        async with self._lock_of_loop():
            running = await self._usable()
            running.tabs += 1
            running.opened += 1
        session = ChromiumTab(running, self)
        try:
            async with asyncio.timeout(OPEN_SECONDS):
                await session.open(proxy)
        except BaseException as error:
            await session.close()
            if isinstance(error, Exception):
                running.stale = True
                raise BrowserGone(f"the browser opens no tab: {first_line(error)}") from error
            raise
        return session

    async def close(self) -> None:
        running = self._running
        self._running = None
        if running is not None:
            await running.stop()

    async def release(self, running: RunningBrowser) -> None:
        """A tab is closed."""
        running.tabs -= 1
        if running.tabs == 0 and running is not self._running:
            await running.stop()

    def _lock_of_loop(self) -> asyncio.Lock:
        """A lock of the loop that runs: environments may get a new one."""
        loop = asyncio.get_running_loop()
        if self._lock is None or self._lock[0] is not loop:
            self._lock = loop, asyncio.Lock()
        return self._lock[1]

    async def _usable(self) -> RunningBrowser:
        running = self._running
        if running is not None and running.usable:
            return running
        self._running = None
        if running is not None and running.tabs == 0 and running.loop is asyncio.get_running_loop():
            await running.stop()
        self._running = await self._start()
        return self._running

    async def _start(self) -> RunningBrowser:
        from playwright.async_api import async_playwright

        starting = asyncio.ensure_future(async_playwright().start())
        try:
            async with asyncio.timeout(START_SECONDS):
                # Shielded, because Playwright's driver can only be stopped once it has started.
                playwright = await asyncio.shield(starting)
                browser = await playwright.chromium.launch(
                    executable_path=self._executable,
                    args=list(FLAGS),
                    chromium_sandbox=has_own_sandbox(),
                    # With it, a page could open any number of windows.
                    ignore_default_args=["--disable-popup-blocking"],
                    # Otherwise Ctrl-C would end the browser before its episodes are closed.
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                    env={**os.environ, "DBUS_SESSION_BUS_ADDRESS": ""},
                )
        except BaseException as error:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await (await starting).stop()
            if isinstance(error, Exception):
                raise BrowserGone(f"the browser does not start: {first_line(error)}") from error
            raise
        return RunningBrowser(playwright, browser, asyncio.get_running_loop())


@dataclass(eq=False)
class ChromiumTab:
    """A tab in a context of its own."""

    running: RunningBrowser
    owner: Chromium
    _gone: str = ""
    _context: Any = None
    _page: Any = None
    _devtools: Any = None
    _loading: LoadingState = field(default_factory=LoadingState)
    _notes: list[str] = field(default_factory=list)
    _popups: list[str] = field(default_factory=list)
    _closed: bool = False
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    async def open(self, proxy: str) -> None:
        self._context = context = await self.running.browser.new_context(
            proxy={"server": proxy, "bypass": "<-loopback>"},
            viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]},
            accept_downloads=False,
            service_workers="block",
            locale="en-US",
        )
        self._page = page = await context.new_page()
        self._devtools = await context.new_cdp_session(page)
        for event in EVENTS:
            self._devtools.on(event, partial(self._loading.read, event))
        await self._devtools.send("Page.enable")
        page.on("crash", lambda _: self._leave("the page crashed"))
        page.on("close", lambda _: self._leave("the page was closed"))
        page.on("dialog", lambda dialog: self._later(self._answer(dialog)))
        page.on("download", lambda _: self._note("A download was refused"))
        context.on("page", lambda popup: self._later(self._close_popup(popup)))

    @property
    def gone(self) -> str:
        """Why the tab is gone; empty while it is there."""
        return self._gone or ("" if self.running.browser.is_connected() else "the browser died")

    async def send(self, method: str, params: dict[str, Any]) -> Any:
        """The reply to a command of the DevTools protocol."""
        return await self._do(lambda: self._devtools.send(method, params))

    async def press(self, key: str) -> None:
        await self._do(lambda: self._page.keyboard.press(key))

    async def click(self, x: float, y: float) -> None:
        await self._do(lambda: self._page.mouse.click(x, y))

    async def _do(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Raises PageFailed if the command fails, and BrowserGone if the tab or the browser is gone."""
        if self.gone:
            raise BrowserGone(self.gone)
        try:
            return await command()
        except Exception as error:
            if "has been closed" in str(error):
                self._leave("the tab was closed")
            if self.gone or type(error).__module__.partition(".")[0] != "playwright":
                raise BrowserGone(self.gone or first_line(error)) from error
            raise PageFailed(first_line(error)) from None

    def notes(self) -> list[str]:
        """What was closed or refused since the last call, in words."""
        notes = self._notes
        self._notes = []
        return notes

    @property
    def loads(self) -> bool:
        """Whether the tab is loading a page, or is about to."""
        return self._loading.loads

    def popups(self) -> list[str]:
        """The addresses of the windows that were closed since the last call."""
        popups = self._popups
        self._popups = []
        return popups

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                if self._context is not None:
                    await self._context.close()
        except Exception:  # noqa: BLE001 - a browser that cannot close a tab is not used again
            self.running.stale = True
        finally:
            for task in self._closing:
                task.cancel()
            await self.owner.release(self.running)

    def _leave(self, reason: str) -> None:
        self._gone = self._gone or reason

    def _note(self, note: str) -> None:
        if len(self._notes) < MAX_REMEMBERED:
            self._notes.append(note)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _answer(self, dialog: Any) -> None:
        """Agree to what a page asks; leave out what it wants to be told."""
        with contextlib.suppress(Exception):
            if dialog.type != "beforeunload":
                self._note(f"A dialog was closed: {quoted(dialog.message)}")
            await (dialog.dismiss() if dialog.type == "prompt" else dialog.accept())

    async def _close_popup(self, popup: Any) -> None:
        with contextlib.suppress(Exception):
            if len(self._popups) < MAX_REMEMBERED:
                self._popups.append(popup.url)
            self._note("A new window was closed")
            await popup.close()

"""Chromium driven by Selenium: a browser of its own for each tab."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.browser.chromium.find import FLAGS, has_own_sandbox
from openclaw_rl.envs.browser.chromium.loading import LoadingState
from openclaw_rl.envs.browser.chromium.tab import VIEWPORT
from openclaw_rl.envs.browser.page import BrowserGone, PageFailed, first_line
from openclaw_rl.envs.browser.view import quoted

VARIABLE = "CHROMEDRIVER"
MISSING = (
    f"The backend selenium needs chromedriver: install it (Debian: apt install chromium-driver), or set {VARIABLE}."
)
#: How long a browser may take to start, to end, and to end when it is killed, and how long a call may keep its thread.
START_SECONDS, CLOSE_SECONDS, KILL_SECONDS, CALL_SECONDS = 60.0, 10.0, 2.0, 30
#: Notes of one tab that are remembered.
MAX_REMEMBERED = 20
#: Flags that Playwright sets too: nothing runs in the background, and http stays http.
QUIET_FLAGS = (
    *("--headless", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-default-apps", "--disable-features=HttpsUpgrades,Translate,OptimizationHints"),
)


def find_driver() -> str:
    """The path of chromedriver. Selenium would download one. Raises ConfigError."""
    if path := shutil.which(os.environ.get(VARIABLE) or "chromedriver"):
        return path
    raise ConfigError(MISSING)


class SeleniumBackend:
    """Opens browsers with one tab each; the next one does not depend on the last."""

    def __init__(self, executable: str, driver: str) -> None:
        self._executable, self._driver = executable, driver
        self._open: set[SeleniumSession] = set()

    async def open(self, proxy: str) -> "SeleniumSession":
        session = SeleniumSession(self._open)
        self._open.add(session)
        try:
            async with asyncio.timeout(START_SECONDS):
                await session.call(lambda: session.start(self._executable, self._driver, proxy))
                await session.send("Page.enable", {})
                await session.send("Browser.setDownloadBehavior", {"behavior": "deny"})
        except BaseException as error:
            await session.close()
            if isinstance(error, Exception):
                raise BrowserGone(f"the browser does not start: {first_line(error)}") from error
            raise
        return session

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in list(self._open)))


class SeleniumSession:
    """A browser with one tab. Selenium blocks, so its calls run in a thread of their own.

    - No process is left when it is closed, even if the browser does not react or is still starting.
    - Downloads are refused.
    """

    def __init__(self, siblings: "set[SeleniumSession]") -> None:
        self._siblings = siblings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="selenium")
        self._driver: Any = None
        self._service: Any = None
        self._window = ""
        self._popups: list[str] = []
        self._notes: list[str] = []
        self._closing = False
        self._loading = LoadingState()
        self._profile = tempfile.TemporaryDirectory(prefix="openclaw-rl-browser-", ignore_cleanup_errors=True)
        self.gone = ""

    def start(self, executable: str, driver: str, proxy: str) -> None:
        try:
            self._start(executable, driver, proxy)
        finally:
            if self._closing:
                # The session was closed before its processes were there.
                self._end_processes()
                self._profile.cleanup()

    def _start(self, executable: str, driver: str, proxy: str) -> None:
        from selenium.webdriver import Chrome, ChromeOptions, ChromeService

        options = ChromeOptions()
        options.binary_location = executable
        options.unhandled_prompt_behavior = "accept"
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        flags = [*QUIET_FLAGS, *FLAGS, f"--proxy-server={proxy}", "--proxy-bypass-list=<-loopback>"]
        flags += [f"--window-size={VIEWPORT[0]},{VIEWPORT[1]}", f"--user-data-dir={self._profile.name}"]
        for flag in flags if has_own_sandbox() else [*flags, "--no-sandbox"]:
            options.add_argument(flag)
        # A process group of its own, so that the browser is killed together with its driver.
        self._service = ChromeService(executable_path=driver, popen_kw={"start_new_session": True})
        self._driver = Chrome(options, self._service)
        self._driver.command_executor.client_config.timeout = CALL_SECONDS
        self._window = self._driver.current_window_handle

    async def call(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if self.gone:
            raise BrowserGone(self.gone)
        try:
            reply: dict[str, Any] = await self.call(lambda: self._driver.execute_cdp_cmd(method, params))
        except Exception as error:
            kind, line = type(error).__name__, first_line(error)
            if kind in ("InvalidSessionIdException", "NoSuchWindowException", "MaxRetryError") or "crashed" in line:
                self.gone = f"the browser died: {line}"
                raise BrowserGone(self.gone) from error
            raise PageFailed(line) from None
        return reply

    async def tidy(self) -> list[str]:
        with contextlib.suppress(PageFailed):
            # It fails if there is no dialog.
            await self.send("Page.handleJavaScriptDialog", {"accept": True})
            return ["A dialog was closed"]
        await self.call(self._read_events)
        notes, self._notes = self._notes, []
        closed: list[str] = await self.call(self._close_windows)
        self._popups += closed
        return notes + [f"A new window was closed: {quoted(address)}" for address in closed]

    async def loads(self) -> bool:
        await self.call(self._read_events)
        return self._loading.loads

    def popups(self) -> list[str]:
        popups, self._popups = self._popups, []
        return popups

    async def close(self) -> None:
        if self not in self._siblings:
            return
        self._siblings.discard(self)
        self._closing = True
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.call(lambda: self._driver and self._driver.quit())
        finally:
            self._end_processes()
            self._thread.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._profile.cleanup)

    def _end_processes(self) -> None:
        process = getattr(self._service, "process", None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_SECONDS)

    def _read_events(self) -> None:
        for entry in self._driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Page.downloadWillBegin" and len(self._notes) < MAX_REMEMBERED:
                self._notes.append("A download was refused")
            self._loading.read(event["method"], event["params"])

    def _close_windows(self) -> list[str]:
        """Close all windows but the first; their addresses."""
        addresses = []
        for window in [one for one in self._driver.window_handles if one != self._window]:
            self._driver.switch_to.window(window)
            addresses.append(self._driver.current_url)
            self._driver.close()
        if addresses:
            self._driver.switch_to.window(self._window)
        return addresses

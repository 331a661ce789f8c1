"""A page in a tab of Chromium: what it shows, and what actions do on it, by Chromium's DevTools protocol."""

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from openclaw_rl.envs.browser.accessibility import MAX_NODES, clickable_nodes, read_tree
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.chromium import VIEWPORT, ChromiumTab
from openclaw_rl.envs.browser.errors import BrowserGone, PageFailed
from openclaw_rl.envs.browser.gate import OriginGate
from openclaw_rl.envs.browser.view import PageElement, PageView, quoted

#: How long one command may take, and how long a page may take to settle after an action.
COMMAND_SECONDS = 5.0
SETTLE_SECONDS = 10.0
#: How long a large page may take to be read.
READ_SECONDS = 20.0
#: A page with more nodes is not read at all. Some of them belong to pages that were shown before.
MAX_DOM_NODES = 10 * MAX_NODES
#: A page has settled if it asked for nothing for so long.
QUIET_SECONDS = 0.05
#: How far one scroll goes, in pixels.
SCROLL_PIXELS = 400
#: Notes that are told at once; the rest is counted.
MAX_NOTES = 5
#: What Chromium says while it changes from one page to the next.
BETWEEN_PAGES = "Not attached to an active page"
NO_RESPONSE = "The page does not respond."
#: Runs after the tasks that an action has queued, such as sending a form.
TIMER = "new Promise(done => setTimeout(done, 20))"
TIMER_SECONDS = 2.0
SELECT = """function(wanted) {
  if (!(this instanceof HTMLSelectElement)) return "This element has no options to select.";
  const clean = text => text.replace(/\\s+/g, " ").trim().toLowerCase();
  for (const option of this.options) {
    if (clean(option.text) !== clean(wanted) && option.value !== wanted) continue;
    if (option.disabled) return "This option is disabled.";
    if (!this.multiple) this.value = option.value;
    option.selected = true;
    this.dispatchEvent(new Event("input", {bubbles: true}));
    this.dispatchEvent(new Event("change", {bubbles: true}));
    return "";
  }
  return "There is no such option.";
}"""
#: Fields that cannot be typed into as text: their value is set.
SET_VALUE = """function(value) {
  if (!["date", "time", "month", "week", "datetime-local", "color", "range"].includes(this.type)) return false;
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(this, value);
  this.dispatchEvent(new Event("input", {bubbles: true}));
  this.dispatchEvent(new Event("change", {bubbles: true}));
  return true;
}"""


class ChromiumPage:
    """A page in a tab. Every call ends within seconds, whatever the page does; it may raise PageFailed and BrowserGone.

    - The tree is Chromium's own, so a page's scripts cannot change how it is read.
    - A script that does not end is ended; every command has a time limit.
    - A tab that left the task's origin is brought back.
    """

    def __init__(self, tab: ChromiumTab, gate: OriginGate) -> None:
        self._tab = tab
        self._gate = gate
        self._notes: list[str] = []
        self._start = ""

    async def open(self, address: str) -> None:
        """Load the first page."""
        self._start = address
        reply = await self._send("Page.navigate", url=address)
        if error := reply.get("errorText"):
            raise PageFailed(f"{address} cannot be opened: {error}.")
        # A page that does not respond yet may do so later, and if not, the model is told.
        with contextlib.suppress(PageFailed):
            await self._settle()

    async def look(self) -> PageView:
        """What the page shows."""
        await self._end_endless_script()
        counters = await self._send("Memory.getDOMCounters")
        if counters.get("nodes", 0) > MAX_DOM_NODES:
            raise PageFailed(f"The page is too large: it has {counters['nodes']} nodes.")
        snapshot = await self._send("DOMSnapshot.captureSnapshot", READ_SECONDS, computedStyles=[])
        tree = await self._send("Accessibility.getFullAXTree", READ_SECONDS)
        return PageView(read_tree(tree["nodes"], clickable_nodes(snapshot)))

    async def perform(self, action: BrowserAction, element: PageElement | None) -> None:
        """Do an action and wait for what follows from it."""
        await self._end_endless_script()
        match action.kind:
            case "click":
                await self._click(element)
            case "type":
                await self._type(element, action.text)
            case "select":
                await self._select(element, action.text)
            case "scroll":
                await self._scroll(SCROLL_PIXELS if action.text == "down" else -SCROLL_PIXELS)
            case "press":
                await self._press(action.text)
            case "back":
                await self._back()
        await self._settle()

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        reply = await self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise PageFailed(f"The script failed: {error_text(reply['exceptionDetails'])}")
        return reply.get("result", {}).get("value")

    async def screenshot(self) -> bytes:
        """The visible part as PNG."""
        reply = await self._send("Page.captureScreenshot", format="png")
        return base64.b64decode(reply["data"])

    def notes(self) -> list[str]:
        """What happened since the last call: dialogs, refused requests, closed windows."""
        notes = self._notes
        self._notes = []
        notes += [f"Refused, because it is outside the task: {quoted(address)}" for address in self._gate.refusals()]
        more = len(notes) - MAX_NOTES
        return [*notes[:MAX_NOTES], f"and {more} more"] if more > 0 else notes

    async def close(self) -> None:
        await self._tab.close()

    async def _send(self, method: str, limit: float = COMMAND_SECONDS, **params: Any) -> Any:
        return await self._in_time(limit, lambda: self._tab.send(method, params))

    async def _in_time(self, limit: float, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(limit):
                while True:
                    try:
                        return await command()
                    except PageFailed as error:
                        if BETWEEN_PAGES not in str(error):
                            raise
                        await asyncio.sleep(QUIET_SECONDS)
        except TimeoutError:
            if self._tab.gone:
                raise BrowserGone(self._tab.gone) from None
            raise PageFailed(NO_RESPONSE) from None

    async def _end_endless_script(self) -> None:
        """Make sure that the page reacts at all, by ending what keeps it busy."""
        try:
            await self._send("Runtime.evaluate", expression="0")
        except PageFailed:
            self._notes.append("A script of the page ran for too long and was ended")
            with contextlib.suppress(PageFailed):
                await self._send("Runtime.terminateExecution")

    async def _settle(self) -> None:
        """Wait until the page has loaded what an action led to, and bring the tab back if it left the task."""
        await self._wait_until_quiet()
        # A new window of the same site is shown in this tab.
        for address in self._tab.popups()[:1]:
            if self._gate.allows(address):
                await self._navigate(address)
        await self._return_to_task()

    async def _return_to_task(self) -> None:
        history = await self._send("Page.getNavigationHistory")
        entries = history["entries"]
        index = history["currentIndex"]
        address = entries[index]["url"]
        if self._gate.allows(address):
            return
        self._gate.refuse(address)
        inside = [entry for entry in entries[:index] if self._gate.allows(entry["url"])]
        if inside:
            await self._send("Page.navigateToHistoryEntry", entryId=inside[-1]["id"])
            await self._wait_until_quiet()
        else:
            await self._navigate(self._start)

    async def _navigate(self, address: str) -> None:
        await self._send("Page.navigate", url=address)
        await self._wait_until_quiet()

    async def _wait_until_quiet(self) -> None:
        """Wait until the tab loads nothing and its page is complete, or for as long as a page may take."""
        with contextlib.suppress(PageFailed):
            # What an action led to is done, or at least announced, when a timer that was set after it has run.
            await self._send("Runtime.evaluate", TIMER_SECONDS, expression=TIMER, awaitPromise=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SECONDS):
                while True:
                    await self._gate.quiet(QUIET_SECONDS)
                    self._notes += self._tab.notes()
                    state = await self._send("Runtime.evaluate", expression="document.readyState")
                    if state.get("result", {}).get("value") == "complete" and not self._tab.loads:
                        return
                    await asyncio.sleep(QUIET_SECONDS)

    async def _click(self, element: PageElement | None) -> None:
        x, y = await self._middle(element)
        await self._in_time(COMMAND_SECONDS, lambda: self._tab.click(x, y))

    async def _middle(self, element: PageElement | None) -> tuple[float, float]:
        """The middle of an element, which is scrolled into view."""
        assert element is not None
        try:
            await self._send("DOM.scrollIntoViewIfNeeded", backendNodeId=element.node)
            quads = (await self._send("DOM.getContentQuads", backendNodeId=element.node))["quads"]
        except PageFailed as error:
            quads = []
            if str(error) == NO_RESPONSE:
                raise
        if not quads:
            raise PageFailed("This element is not visible, or it is gone.")
        quad = quads[0]
        return sum(quad[::2]) / 4, sum(quad[1::2]) / 4

    async def _type(self, element: PageElement | None, text: str) -> None:
        assert element is not None
        if await self._call(element, SET_VALUE, text) is True:
            return
        await self._click(element)
        try:
            await self._send("DOM.focus", backendNodeId=element.node)
        except PageFailed:
            raise PageFailed("Nothing can be typed into this element.") from None
        await self._send("Input.dispatchKeyEvent", type="rawKeyDown", commands=["selectAll"])
        await self._press("Delete")
        if text:
            await self._send("Input.insertText", text=text)

    async def _select(self, element: PageElement | None, option: str) -> None:
        assert element is not None
        if problem := await self._call(element, SELECT, option):
            raise PageFailed(str(problem))

    async def _call(self, element: PageElement, function: str, argument: str) -> Any:
        """The result of a function of ours on an element."""
        try:
            node = (await self._send("DOM.resolveNode", backendNodeId=element.node))["object"]["objectId"]
        except PageFailed:
            raise PageFailed("This element is gone.") from None
        reply = await self._send(
            "Runtime.callFunctionOn",
            objectId=node,
            functionDeclaration=function,
            arguments=[{"value": argument}],
            returnByValue=True,
        )
        return reply.get("result", {}).get("value")

    async def _scroll(self, pixels: int) -> None:
        x = VIEWPORT[0] / 2
        y = VIEWPORT[1] / 2
        await self._send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=pixels)

    async def _press(self, key: str) -> None:
        await self._in_time(COMMAND_SECONDS, lambda: self._tab.press(key))

    async def _back(self) -> None:
        history = await self._send("Page.getNavigationHistory")
        index = history["currentIndex"]
        # The first entry is the empty page that every tab begins with.
        if index < 1 or not self._gate.allows(history["entries"][index - 1]["url"]):
            raise PageFailed("There is no page to go back to.")
        await self._send("Page.navigateToHistoryEntry", entryId=history["entries"][index - 1]["id"])


def error_text(details: dict[str, Any]) -> str:
    """The first line of a JavaScript error."""
    lines = str(details.get("exception", {}).get("description") or details.get("text", "")).splitlines()
    return lines[0][:200] if lines else "an error without a text"

"""One attempt at a task on a page: shows the page, does the action of each answer, keeps screenshots, and scores."""

import asyncio
import base64
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Outcome, Step, Tool
from openclaw_rl.envs.browser.actions import FORMS, TOOL, BadAction, BrowserAction, read_action, tool_calls
from openclaw_rl.envs.browser.errors import PageFailed
from openclaw_rl.envs.browser.scenes import Scene
from openclaw_rl.envs.browser.tab import ChromiumPage
from openclaw_rl.envs.browser.view import PageElement, PageView, clean
from openclaw_rl.lab.commands import new_folder
from openclaw_rl.ledger.screenshot_folders import folder_name

INSTRUCTION = f"Do what the user asks on the web page. Answer with one action: {FORMS}."
TOOL_INSTRUCTION = "Do what the user asks on the web page. Call the tool browser with one action at a time."
ONLY_FIRST = "Not done: one action at a time, and only the first of an answer is done."
#: After so many failures in a row to show the page, the attempt ends.
MAX_BLIND_STEPS = 2
NOT_SHOWN = "(the page cannot be shown)"


class ScreenshotFolder:
    """The screenshots of one attempt, a file for each look at the page: 000.png, 001.png …"""

    def __init__(self, root: Path, name: str) -> None:
        self._folder: Path | None = None
        self._root = root
        self._name = folder_name(name)
        self._numbers = count()

    async def save(self, page: ChromiumPage) -> bytes:
        """Take a screenshot and keep it. A page that cannot be drawn leaves a gap."""
        number = next(self._numbers)
        image = await screenshot(page)
        if image:
            await asyncio.to_thread(self._write, number, image)
        return image

    def _write(self, number: int, image: bytes) -> None:
        if self._folder is None:
            self._folder = new_folder(self._root / self._name)
        (self._folder / f"{number:03}.png").write_bytes(image)


class BrowserEpisode:
    """Shows a page and does actions on it.

    - An answer that is no action, and an action that fails, is told to the model, and the attempt goes on.
    - The attempt ends with `done`, with an action that ends the task, after `max_steps` answers, or when the page
      cannot be shown twice in a row.
    - A step that was not part of the known solution has a hint: what was wrong, and the action to write instead.
    """

    def __init__(
        self,
        scene: Scene,
        examples: Sequence[Message],
        *,
        offers_tool: bool,
        images: bool,
        record: ScreenshotFolder | None,
    ) -> None:
        self.tools: Sequence[Tool] = [TOOL] if offers_tool else []
        self._scene = scene
        self._examples = examples
        self._images = images
        self._record = record
        self._page: ChromiumPage | None = None
        self.view = PageView([])
        self._left = list(scene.solution)
        self._first_line = self._steps = self._blind = 0

    async def start(self) -> Sequence[Message]:
        self._page = page = await self._scene.open()
        goal = await self._scene.goal(page)
        instruction: Message = {"role": "system", "content": TOOL_INSTRUCTION if self.tools else INSTRUCTION}
        return [instruction, *self._examples, await self._observe(f"{goal}\n", {"role": "user"})]

    async def step(self, answer: Message) -> Step:
        page = self._opened
        self._steps += 1
        hint = problem = ""
        done = False
        try:
            action = read_action(answer)
            hint = self._hint_for(action)
            done = action.kind == "done"
            if not done:
                await self._do(page, action)
        except (BadAction, PageFailed) as error:
            problem = str(error)
            hint = " ".join(filter(None, [problem, hint or self._next_action()]))
        done = done or self._steps >= self._scene.max_steps or await self._scene.over(page)
        if done:
            return Step(hint=hint, done=True)
        messages = await self._messages(answer, f"{problem}\n" if problem else "")
        return Step(messages, hint=hint, done=self._blind >= MAX_BLIND_STEPS)

    async def outcome(self) -> Outcome:
        page = self._opened
        outcome = await self._scene.outcome(page)
        if self._record:
            await self._record.save(page)
        return outcome

    async def close(self) -> None:
        try:
            if self._page is not None:
                await self._page.close()
        finally:
            await self._scene.close()

    @property
    def _opened(self) -> ChromiumPage:
        assert self._page is not None
        return self._page

    async def _do(self, page: ChromiumPage, action: BrowserAction) -> None:
        element: PageElement | None = None
        if action.element is not None:
            element = self.view.element(action.element)
            if element is None:
                raise PageFailed(f"There is no element {action.element}.")
        if action.kind == "scroll":
            self._first_line = self.view.scrolled(self._first_line, action.text)
        await page.perform(action, element)
        if action.kind != "scroll":
            self._first_line = 0

    async def _messages(self, answer: Message, problem: str) -> list[Message]:
        """The page as the reply to an answer: for tool calls, one message for each."""
        calls = tool_calls(answer)
        if not calls:
            return [await self._observe(problem, {"role": "user"})]
        ids = [call.get("id", "") if isinstance(call, dict) else "" for call in calls]
        rest: list[Message] = [{"role": "tool", "tool_call_id": id_, "content": ONLY_FIRST} for id_ in ids[1:]]
        return [await self._observe(problem, {"role": "tool", "tool_call_id": ids[0]}), *rest]

    async def _observe(self, before: str, head: Message) -> Message:
        """The page as a message, after what has to be said first."""
        page = self._opened
        try:
            self.view = await page.look()
            self._blind = 0
            shown = self.view.text(self._first_line)
        except PageFailed as error:
            self.view = PageView([])
            self._blind += 1
            shown = f"{error} {NOT_SHOWN}"
        text = before + "".join(f"({note})\n" for note in page.notes()) + shown
        image = await self._record.save(page) if self._record else b""
        if not self._images:
            return {**head, "content": text}
        image = image or await screenshot(page)
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        parts: list[Message] = [{"type": "text", "text": text}]
        if image:
            parts.append({"type": "image_url", "image_url": {"url": url}})
        return {**head, "content": parts}

    def _hint_for(self, action: BrowserAction) -> str:
        """Empty for an action that is part of the solution; otherwise the next action of the solution."""
        element = self.view.element(action.element) if action.element is not None else None
        made = [action.kind, element.role if element else "", clean(element.name) if element else "", action.text]
        if made in self._left:
            self._left.remove(made)
            return ""
        return self._next_action()

    def _next_action(self) -> str:
        """The next action of the known solution, if it can be done on this page."""
        if not self._left:
            return ""
        kind, role, name, text = self._left[0]
        number = self.view.number(role, name)
        return "" if number is None else f"Write: {BrowserAction(kind, number, text)}"


async def screenshot(page: ChromiumPage) -> bytes:
    """The visible part of a page; empty if it cannot be had."""
    try:
        return await page.screenshot()
    except PageFailed:
        return b""


def writable_folder(given: str | Path) -> Path:
    """Raises ConfigError if nothing can be written there."""
    folder = Path(given).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"Screenshots cannot be kept in {folder}: {error.strerror or error}.") from None
    return folder

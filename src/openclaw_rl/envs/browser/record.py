"""Screenshots that are kept: one folder for each attempt, one file for each look at the page."""

import asyncio
import re
from itertools import count
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.browser.page import PageFailed, WebPage

#: How much of a task's name stands in the name of its folder.
MAX_NAME_CHARACTERS = 80


class ScreenshotFolder:
    """The screenshots of one attempt, as 000.png, 001.png …"""

    def __init__(self, root: Path, task: str) -> None:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", task)[:MAX_NAME_CHARACTERS]
        self._folder: Path | None = None
        self._root, self._name = root, name
        self._numbers = count()

    async def save(self, page: WebPage) -> bytes:
        """Take a screenshot and keep it. A page that cannot be drawn leaves a gap."""
        number = next(self._numbers)
        try:
            image = await page.screenshot()
        except PageFailed:
            return b""
        await asyncio.to_thread(self._write, number, image)
        return image

    def _write(self, number: int, image: bytes) -> None:
        if self._folder is None:
            self._folder = new_folder(self._root, self._name)
        (self._folder / f"{number:03}.png").write_bytes(image)


def new_folder(root: Path, name: str) -> Path:
    """A folder of its own for each attempt at a task."""
    for number in count(1):
        folder = root / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError


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

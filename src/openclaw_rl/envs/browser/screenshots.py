"""Screenshots that are kept: a folder for each attempt, named after its session; a file for each look at the page."""

import asyncio
from itertools import count
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.browser.page import PageFailed, WebPage
from openclaw_rl.envs.folders import new_folder
from openclaw_rl.ledger.screenshots import folder_name


class ScreenshotFolder:
    """The screenshots of one attempt, as 000.png, 001.png …"""

    def __init__(self, root: Path, name: str) -> None:
        self._folder: Path | None = None
        self._root, self._name = root, folder_name(name)
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
            self._folder = new_folder(self._root / self._name)
        (self._folder / f"{number:03}.png").write_bytes(image)


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

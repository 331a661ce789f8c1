"""The pages of MiniWoB++ as tasks. Needs the package `miniwob`, of which only the HTML is used."""

import importlib.util
import json
import mimetypes
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Outcome, Task
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.gate import SiteReply, SiteRequest
from openclaw_rl.envs.browser.scenes import SITE_ORIGIN, Scene, value_of
from openclaw_rl.envs.browser.site_tasks import MAX_EXAMPLES, site_examples
from openclaw_rl.envs.browser.tab import ChromiumPage
from openclaw_rl.lab.tasks import checked_examples, checked_split, digest, split_of

PACKAGE = "miniwob"
MISSING = "The pages of MiniWoB++ need the package miniwob: pip install --no-deps miniwob"
#: Tasks of one page.
SEEDS = 2**31
MAX_STEPS = 12
#: Its own time limit is for programs; a model needs longer.
START = (
    "Math.seedrandom({seed}); core.EPISODE_MAX_TIME = 3600000; core.startEpisodeReal(); core.hideDisplay(); "
    "document.getElementById('click-canvas').style.display = 'none'; core.getUtterance()"
)
#: What MiniWoB++ gives for an episode that did not end.
UNFINISHED = -1.0


class MiniWob:
    """The pages of MiniWoB++, with the rewards that they give themselves, from -1 to 1; 1 means solved.

    One task is a page and a seed; the two together belong to one split, by a digest.
    """

    def __init__(self, pages: Any, examples: Any) -> None:
        self._folder = html_folder()
        known = sorted(path.stem for path in (self._folder / "miniwob").glob("*.html"))
        names = pages.split(",") if isinstance(pages, str) else list(pages)
        self._pages = known if names == ["all"] else names
        if unknown := [name for name in self._pages if name not in known]:
            raise ConfigError(f"MiniWoB++ has no page {unknown[0]}; there are {', '.join(known)}.")
        self._examples = checked_examples("browser", examples, MAX_EXAMPLES)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("browser", split)
        return (self._task(split, Random(f"miniwob {split} {seed} {index}")) for index in count())

    def scene(self, task: Task, chromium: Chromium) -> "MiniWobScene":
        return MiniWobScene(self._folder, task.data["page"], task.data["seed"], chromium)

    def examples(self, task: Task, *, offers_tool: bool) -> list[Message]:
        """Examples of a built-in site: they show what an action looks like."""
        return site_examples("shop", 1, self._examples, offers_tool=offers_tool)

    def _task(self, split: str, random: Random) -> Task:
        page = random.choice(self._pages)
        while split_of(digest([page, seed := random.randrange(SEEDS)])) != split:
            pass
        return Task(f"browser/{split}/{page}-{seed}", {"page": page, "seed": seed})


class MiniWobScene(Scene):
    """One page with one seed."""

    def __init__(self, folder: Path, page: str, seed: int, chromium: Chromium) -> None:
        super().__init__(chromium, f"{SITE_ORIGIN}/miniwob/{page}.html", self._file, MAX_STEPS)
        self._folder = folder.resolve()
        self._seed = seed

    async def goal(self, page: ChromiumPage) -> str:
        return str(await value_of(page, START.format(seed=json.dumps(str(self._seed)))))

    async def over(self, page: ChromiumPage) -> bool:
        return bool(await value_of(page, "WOB_DONE_GLOBAL"))

    async def outcome(self, page: ChromiumPage) -> Outcome:
        done, reward, reason = await value_of(page, "[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL, WOB_REWARD_REASON]")
        if not done:
            return Outcome(UNFINISHED, solved=False, hint="The task was not finished.")
        hint = "" if reward >= 1 else str(reason or "That was wrong.")
        return Outcome(float(reward), reward >= 1, hint)

    def _file(self, request: SiteRequest) -> SiteReply:
        path = (self._folder / unquote(urlsplit(request.path).path).lstrip("/")).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            return SiteReply(status=404)
        return SiteReply(path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream")


def html_folder() -> Path:
    """Where the pages are. The package itself is not imported: it would need others. Raises ConfigError."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(MISSING)
    return Path(spec.submodule_search_locations[0]) / "html"

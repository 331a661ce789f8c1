"""What the tabs of attempts show: a built-in site, or the pages of somebody else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from openclaw_rl.envs.base import EnvFailed, Outcome
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.errors import PageFailed
from openclaw_rl.envs.browser.gate import Answerer, OriginGate, SiteReply, SiteRequest
from openclaw_rl.envs.browser.site_pages import Move, Site
from openclaw_rl.envs.browser.tab import ChromiumPage

#: Where the pages of built-in sites and of MiniWoB++ are: a name that leads nowhere but to the gate.
SITE_ORIGIN = "http://task.localhost"
#: Answers beyond those of the known solution.
SPARE_STEPS = 4


class Scene(ABC):
    """What is on the page of one attempt: what is asked, when it is over, and how it is scored.

    The tab has a gate in front of it, which is closed with the scene.
    """

    solution: list[Move]
    """The moves that solve it, where they are known."""

    def __init__(self, chromium: Chromium, address: str, answer: Answerer | None, max_steps: int) -> None:
        """`answer` gives the pages; without it, they are those of the address."""
        parts = urlsplit(address)
        self.max_steps = max_steps
        self.solution = []
        self._chromium = chromium
        self._address = address
        self._gate = OriginGate(f"{parts.scheme}://{parts.netloc}", answer)

    async def open(self) -> ChromiumPage:
        """A tab with the first page. Raises EnvFailed."""
        page = ChromiumPage(await self._chromium.open(await self._gate.start()), self._gate)
        try:
            await page.open(self._address)
        except PageFailed as error:
            await page.close()
            raise EnvFailed(str(error)) from None
        except BaseException:
            await page.close()
            raise
        return page

    async def close(self) -> None:
        await self._gate.close()

    @abstractmethod
    async def goal(self, page: ChromiumPage) -> str:
        """What is asked, in words."""

    @abstractmethod
    async def over(self, page: ChromiumPage) -> bool: ...
    @abstractmethod
    async def outcome(self, page: ChromiumPage) -> Outcome: ...


class SiteScene(Scene):
    """A built-in site. The site itself knows what was done, so the score needs no browser."""

    def __init__(self, site: Site, data: Mapping[str, Any], chromium: Chromium) -> None:
        moves = len(data["solution"])
        max_steps = moves + SPARE_STEPS if moves > 1 else moves
        super().__init__(chromium, f"{SITE_ORIGIN}/", lambda request: site_reply(site, request), max_steps)
        self.solution = [list(move) for move in data["solution"]]
        self._site = site
        self._goal = data["goal"]

    async def goal(self, page: ChromiumPage) -> str:
        return str(self._goal)

    async def over(self, page: ChromiumPage) -> bool:
        return self._site.over

    async def outcome(self, page: ChromiumPage) -> Outcome:
        return self._site.outcome()


def site_reply(site: Site, request: SiteRequest) -> SiteReply:
    """A request's page; after a form, the address of the page that follows."""
    path = unquote(urlsplit(request.path).path)
    if request.verb == "POST":
        fields = dict(parse_qsl(request.body.decode("utf-8", "replace"), keep_blank_values=True))
        return SiteReply(status=303, headers={"Location": quote(site.post(path, fields))})
    if path == "/favicon.ico":
        return SiteReply(status=204)
    return SiteReply(site.get(path).html().encode())


async def value_of(page: ChromiumPage, expression: str) -> Any:
    """The value of a JavaScript expression, on which the task depends. Raises EnvFailed."""
    try:
        return await page.evaluate(expression)
    except PageFailed as error:
        raise EnvFailed(f"the check of the page failed: {error}") from None

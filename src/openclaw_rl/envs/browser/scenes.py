"""What the tabs of attempts show: a built-in site, or the pages of somebody else."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from openclaw_rl.envs.base import EnvFailed, Outcome
from openclaw_rl.envs.browser.chromium import Chromium
from openclaw_rl.envs.browser.gate import Answerer, OriginGate, SiteReply, SiteRequest
from openclaw_rl.envs.browser.page import PageFailed, WebPage
from openclaw_rl.envs.browser.sites.site import Site
from openclaw_rl.envs.browser.tab import ChromiumPage

#: Where the pages of built-in sites and of MiniWoB++ are: a name that leads nowhere but to the gate.
SITE_ORIGIN = "http://task.localhost"
#: Answers beyond those of the known solution.
SPARE_STEPS = 4


class GatedTab:
    """A tab and the gate in front of it; both are closed together."""

    def __init__(self, chromium: Chromium) -> None:
        self._chromium = chromium
        self._gate: OriginGate | None = None

    async def open(self, origin: str, address: str, answer: Answerer | None = None) -> WebPage:
        """A tab with a page. Raises EnvFailed."""
        self._gate = gate = OriginGate(origin, answer)
        page = ChromiumPage(await self._chromium.open(await gate.start()), gate)
        try:
            await page.open(address)
        except PageFailed as error:
            await page.close()
            raise EnvFailed(str(error)) from None
        except BaseException:
            await page.close()
            raise
        return page

    async def close(self) -> None:
        if self._gate is not None:
            await self._gate.close()


class SiteScene:
    """A built-in site. The site itself knows what was done, so the score needs no browser."""

    def __init__(self, site: Site, data: Mapping[str, Any], chromium: Chromium) -> None:
        self._site = site
        self._goal = data["goal"]
        self.solution: list[list[str]] = [list(move) for move in data["solution"]]
        self.max_steps = len(self.solution) + (SPARE_STEPS if len(self.solution) > 1 else 0)
        self._gated_tab = GatedTab(chromium)

    async def open(self) -> WebPage:
        return await self._gated_tab.open(SITE_ORIGIN, f"{SITE_ORIGIN}/", self._answer)

    async def goal(self, page: WebPage) -> str:
        return str(self._goal)

    async def over(self, page: WebPage) -> bool:
        return self._site.over

    async def outcome(self, page: WebPage) -> Outcome:
        return self._site.outcome()

    async def close(self) -> None:
        await self._gated_tab.close()

    def _answer(self, request: SiteRequest) -> SiteReply:
        return site_reply(self._site, request)


def site_reply(site: Site, request: SiteRequest) -> SiteReply:
    """A request's page; after a form, the address of the page that follows."""
    path = unquote(urlsplit(request.path).path)
    if request.verb == "POST":
        fields = dict(parse_qsl(request.body.decode("utf-8", "replace"), keep_blank_values=True))
        return SiteReply(status=303, headers={"Location": quote(site.post(path, fields))})
    if path == "/favicon.ico":
        return SiteReply(status=204)
    return SiteReply(site.get(path).html().encode())


class ScriptedScene:
    """Pages that are scored by JavaScript: a start, an end and a score."""

    #: Without a known solution, an attempt ends after so many answers.
    max_steps: int
    solution: list[list[str]]

    def __init__(self, chromium: Chromium, address: str, answer: Answerer | None, max_steps: int) -> None:
        self._gated_tab = GatedTab(chromium)
        self._address = address
        self._answerer = answer
        self.max_steps = max_steps
        self.solution = []

    async def open(self) -> WebPage:
        parts = urlsplit(self._address)
        return await self._gated_tab.open(f"{parts.scheme}://{parts.netloc}", self._address, self._answerer)

    async def close(self) -> None:
        await self._gated_tab.close()

    async def value(self, page: WebPage, expression: str) -> Any:
        """The value of an expression, on which the task depends. Raises EnvFailed."""
        try:
            return await page.evaluate(expression)
        except PageFailed as error:
            raise EnvFailed(f"the check of the page failed: {error}") from None

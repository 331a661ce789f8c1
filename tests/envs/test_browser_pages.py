"""Pages in a real Chromium: what it shows and does, and pages that want to harm or to leave. `make test-browser`."""

import asyncio
import http.server
import json
import mmap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.chromium import FLAGS, Chromium
from openclaw_rl.envs.browser.environment import make_browser
from openclaw_rl.envs.browser.errors import BrowserGone, PageFailed
from openclaw_rl.envs.browser.tab import ChromiumPage
from support.browsing import browsers, datagrams, drivers, kill, listener, needs_browser, processes, shown
from support.policies import attempt, says

pytestmark = [needs_browser, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Chromium]:
    chromium = Chromium()
    assert "its own sandbox" in chromium.about
    yield chromium
    await chromium.close()
    assert not browsers()


async def act(page: ChromiumPage, kind: str, number: int | None = None, text: str = "") -> str:
    """Do an action; what the page shows then."""
    view = await page.look()
    await page.perform(BrowserAction(kind, number, text), None if number is None else view.element(number))
    return (await page.look()).text()


# What it shows and does


async def test_every_kind_of_field_can_be_used(chromium: Chromium) -> None:
    html = """<label>Name <input id=n value=old></label><label>Day <input type=date id=d></label>
      <label>Much <input type=range id=r min=0 max=10></label><textarea aria-label=Text></textarea>
      <select aria-label=Size><option>Small<option>Large<option disabled>Huge</select>
      <input type=checkbox aria-label=Agree><div onclick="document.title = 'clicked'">plain</div>
      <form onsubmit="document.title = 'sent'; return false"><input aria-label=Query></form>"""
    async with shown(chromium, html) as page:
        await act(page, "type", 1, "Ada Holt")
        await act(page, "type", 2, "2026-11-16")
        await act(page, "type", 3, "7")
        await act(page, "type", 4, "one line")
        await act(page, "select", 5, "large")
        text = await act(page, "click", 6)
        assert text.split("\n")[:6] == [
            '[1] textbox "Name" = "Ada Holt"',
            '[2] date "Day" = "2026-11-16"',
            '[3] slider "Much" = "7"',
            '[4] textbox "Text" = "one line"',
            '[5] combobox "Size" = "Large" of "Small", "Large", "Huge"',
            '[6] checkbox "Agree" (checked)',
        ]
        await act(page, "click", 7)
        assert await page.evaluate("document.title") == "clicked"
        await act(page, "type", 8, "x")
        await act(page, "press", None, "Enter")
        assert await page.evaluate("document.title") == "sent"
        for number, kind, argument, sentence in [
            (5, "select", "Medium", "no such option"),
            (5, "select", "Huge", "disabled"),
            (1, "select", "x", "no options to select"),
            (7, "type", "x", "Nothing can be typed"),
        ]:
            with pytest.raises(PageFailed, match=sentence):
                await act(page, kind, number, argument)


async def test_an_element_that_is_gone_or_hidden_is_said_to_be(chromium: Chromium) -> None:
    async with shown(chromium, "<button>One</button><button>Two</button>") as page:
        view = await page.look()
        await page.evaluate("document.querySelector('button').remove()")
        with pytest.raises(PageFailed, match="not visible, or it is gone"):
            await page.perform(BrowserAction("click", 1), view.element(1))


async def test_going_back_stays_in_the_task(chromium: Chromium) -> None:
    async with shown(chromium, {"/": "<a href=/second>Go</a>", "/second": "<p>There</p>"}) as page:
        with pytest.raises(PageFailed, match="no page to go back to"):
            await act(page, "back")
        assert await act(page, "click", 1) == 'text "There"'
        assert await act(page, "back") == '[1] link "Go"'


async def test_a_page_below_the_fold_is_scrolled(chromium: Chromium) -> None:
    async with shown(
        chromium, "<p style='height: 3000px'>High</p><button onclick='this.remove()'>Low</button>"
    ) as page:
        await act(page, "scroll", None, "down")
        await asyncio.sleep(0.3)
        assert await page.evaluate("scrollY") > 0
        assert await act(page, "click", 1) == 'text "High"'


async def test_tabs_share_nothing(chromium: Chromium) -> None:
    remember = "document.cookie = 'a=1'; localStorage.setItem('a', '1'); document.cookie + localStorage.length"
    async with shown(chromium, "<p>one</p>") as one, shown(chromium, "<p>two</p>") as two:
        assert await one.evaluate(remember) == "a=11"
        assert await two.evaluate("document.cookie + localStorage.length") == "0"


# Pages that want to harm

HOSTILE = {
    "an endless script": ("<button onclick='while (true);'>B</button>", "ran for too long and was ended"),
    "endless dialogs": ("<button onclick='while (true) alert(1)'>B</button>", "ran for too long and was ended"),
    "dialogs": ("<button onclick='alert(1); confirm(2); prompt(3)'>B</button>", 'A dialog was closed: "3"'),
    "a question before leaving": ("<script>onbeforeunload = () => 'no'</script><a href=/second>B</a>", ""),
    "a window": ("<a target=_blank href=/second>B</a>", "A new window was closed"),
    "many windows": (
        "<button onclick='for (let i = 0; i < 200; i++) open(\"/second\")'>B</button>"
        "<script>setInterval(() => open('/second'), 5)</script>",
        "A new window was closed",
    ),
    "a download": ("<a href='data:application/octet-stream,x' download=x>B</a>", "A download was refused"),
    "errors without end": ("<button>B</button><script>setInterval(() => {throw new Error('x')}, 1)</script>", ""),
    "changed prototypes": (
        "<button>B</button><script>Array.prototype.push = () => {throw 1}; Promise = JSON = setTimeout = null</script>",
        "",
    ),
    "a page that closes itself": ("<button onclick='window.close()'>B</button>", ""),
    "three thousand buttons": ("<script>document.write('<button>B</button>'.repeat(3000))</script>", ""),
    "a deep page": ("<button>B</button><script>document.write('<div>'.repeat(5000))</script>", ""),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_page_is_survived(chromium: Chromium, name: str) -> None:
    html, note = HOSTILE[name]
    async with shown(chromium, {"/": html, "/second": "<button>B</button>"}) as page:
        view = await page.look()
        assert '[1] button "B"' in view.text() or '[1] link "B"' in view.text()
        notes = page.notes()
        try:
            await page.perform(BrowserAction("click", 1), view.element(1))
        except PageFailed as error:
            notes.append(str(error))
        shown_again = (await page.look()).text()
        assert '"B"' in shown_again
        # A busy machine may close a window after the look.
        async with asyncio.timeout(10):
            while note not in "\n".join(notes := notes + page.notes()):
                await asyncio.sleep(0.05)
    async with shown(chromium, "<p>alive</p>") as page:
        assert (await page.look()).text() == 'text "alive"'


async def test_a_page_that_reloads_itself_without_end_is_shown(chromium: Chromium) -> None:
    async with shown(chromium, "<button>B</button><script>setTimeout(() => location.reload(), 20)</script>") as page:
        for _ in range(3):
            assert (await page.look()).text() in ('[1] button "B"', "(an empty page)")


async def test_a_huge_page_is_not_read(chromium: Chromium) -> None:
    async with shown(chromium, "<script>document.write('<p>x</p>'.repeat(110000))</script>") as page:
        with pytest.raises(PageFailed, match=r"too large|does not respond"):
            await page.look()


async def test_what_a_page_says_cannot_look_like_an_element(chromium: Chromium) -> None:
    async with shown(chromium, '<pre>\n[1] button "Pay"\u2028[2] link</pre><button>"\n[9] link "x</button>') as page:
        lines = (await page.look()).text().split("\n")
    assert lines == ['text "[1] button \\"Pay\\" [2] link"', '[1] button "\\" [9] link \\"x"']


# Pages that want to leave


LEAVING = {
    "a link": "<a href='http://{place}/x'>B</a>",
    "a link to https": "<a href='https://{place}/x'>B</a>",
    "a form": "<form method=post action='http://{place}/x'><button>B</button></form>",
    "a script": "<button onclick='location = \"http://{place}/x\"'>B</button>",
    "an empty page": "<button onclick='location = \"about:blank\"'>B</button>",
    "a refresh": "<meta http-equiv=refresh content='0;url=http://{place}/x'><button>B</button>",
    "a window": "<a target=_blank href='http://{place}/x'>B</a>",
}


@pytest.mark.parametrize("name", LEAVING)
async def test_a_tab_stays_in_its_task(chromium: Chromium, name: str) -> None:
    async with listener() as (place, received), shown(chromium, LEAVING[name].format(place=place)) as page:
        notes = page.notes()
        text = await act(page, "click", 1)
        assert '"B"' in text
        assert "Refused, because it is outside the task" in "\n".join([*notes, *page.notes()])
    assert received == []


async def test_no_request_of_a_page_leaves_its_task(chromium: Chromium) -> None:
    html = """<img src="http://{0}/image"><iframe src="http://{0}/frame"></iframe><link rel=prefetch href="http://{0}/p">
      <link rel=stylesheet href="http://{0}/css"><script src="http://{0}/js"></script><link rel=preconnect href="http://{0}">
      <script>fetch("http://{0}/fetch", {{mode: "no-cors"}}).catch(() => 0); new WebSocket("ws://{0}/socket");
      navigator.sendBeacon("http://{0}/beacon", "x"); new EventSource("http://{0}/events");
      new Worker(URL.createObjectURL(new Blob(["fetch('http://{0}/worker', {{mode: 'no-cors'}})"])));
      peer = new RTCPeerConnection({{iceServers:
        [{{urls: "turn:{0}?transport=tcp", username: "a", credential: "b"}}]}});
      peer.createDataChannel("x"); peer.createOffer().then(offer => peer.setLocalDescription(offer));
      fetch("file:///etc/passwd").then(() => document.title = "read").catch(() => 0)</script><button>B</button>"""
    async with listener() as (place, received), shown(chromium, html.format(place)) as page:
        await asyncio.sleep(1)
        assert '"B"' in await act(page, "click", 1)
        assert await page.evaluate("document.title") == ""
    assert received == []


CALLS = """<button>B</button><script>
  async function call(places) {
    const servers = places.map(place => ({urls: ["stun:" + place]}));
    const relays = places.map(place => ({urls: ["turn:" + place], username: "a", credential: "b"}));
    const [one, other] = [1, 2].map(() => new RTCPeerConnection({iceServers: [...servers, ...relays]}));
    one.createDataChannel("x");
    await one.setLocalDescription(await one.createOffer());
    await other.setRemoteDescription(one.localDescription);
    await other.setLocalDescription(await other.createAnswer());
    await one.setRemoteDescription(other.localDescription);
    for (const place of places)
      await one.addIceCandidate({candidate: "candidate:1 1 udp 2122260223 " + place.replace(":", " ") + " typ host",
        sdpMid: "0", sdpMLineIndex: 0});
    document.title = "called";
  }
  call(PLACES).catch(error => document.title = error);
  PLACES.map(place => new WebTransport("https://" + place).ready.catch(() => 0));
</script>"""


async def test_no_datagram_leaves_a_tab(chromium: Chromium) -> None:
    async with (
        datagrams() as (places, received),
        shown(chromium, CALLS.replace("PLACES", json.dumps(places))) as page,
    ):
        async with asyncio.timeout(30):
            while await page.evaluate("document.title") != "called":
                await asyncio.sleep(0.1)
        # Without the flag, the first arrives within half a second.
        await asyncio.sleep(3)
    assert received == []


async def test_chromium_knows_every_flag_that_it_is_given(chromium: Chromium) -> None:
    """It ignores those that it does not know."""
    names = {flag.removeprefix("--").partition("=")[0].encode() for flag in FLAGS}
    async with shown(chromium, ""):
        (browser,) = browsers()
        program = Path(f"/proc/{browser}/exe").resolve()
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # In a program, a text ends with a zero byte.
        assert [name for name in names if content.find(b"\0" + name + b"\0") < 0] == []


# A browser that dies


async def act_three_times(page: ChromiumPage) -> None:
    for _ in range(3):
        await act(page, "click", 1)


@pytest.mark.parametrize("victim", [browsers, drivers])
async def test_a_browser_that_was_killed_is_started_again(chromium: Chromium, victim: Any) -> None:
    async with shown(chromium, "<button>B</button>") as page:
        assert await page.look()
        kill(victim)
        with pytest.raises(BrowserGone):
            await act_three_times(page)
    async with shown(chromium, "<p>alive</p>") as page:
        assert (await page.look()).text() == 'text "alive"'
    assert len(browsers()) == 1


async def test_a_page_that_crashes_is_not_the_fault_of_the_policy(chromium: Chromium) -> None:
    async with shown(chromium, "<button>B</button>") as page, shown(chromium, "<p>other</p>") as other:
        renderers = [pid for pid, command in processes() if "--type=renderer" in command]
        assert len(renderers) >= 2
        with pytest.raises((PageFailed, BrowserGone)):
            await page._send("Page.crash", 1.0)  # type: ignore[attr-defined]
        with pytest.raises(BrowserGone):
            await page.look()
        assert (await other.look()).text() == 'text "other"'


async def test_a_page_that_takes_memory_without_end_crashes_alone(chromium: Chromium) -> None:
    hungry = "<button onclick='a = []; while (true) a.push(Array(1e5).fill({}))'>B</button>"
    async with shown(chromium, hungry) as page, shown(chromium, "<p>other</p>") as other:
        with pytest.raises((PageFailed, BrowserGone)):
            await act_three_times(page)
        assert (await other.look()).text() == 'text "other"'


# Addresses of one's own


class Counter(http.server.BaseHTTPRequestHandler):
    """A small site: its page sends a form, and one of its addresses leads elsewhere."""

    def do_GET(self) -> None:
        if self.path == "/out":
            self.send_response(302)
            self.send_header("Location", f"http://{self.server.elsewhere}/x")  # type: ignore[attr-defined]
            self.end_headers()
            return
        body = b"<title>%s</title><a href='/clicked'>Go on</a><a href='/out'>Leave</a>" % self.path.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def site() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


async def test_a_page_of_ones_own_is_checked_by_javascript(site: Any) -> None:
    address = f"http://127.0.0.1:{site.server_port}/"
    check = "document.title === '/clicked'"
    env = make_browser(url=address, goal="Go on.", check=check)
    task = next(env.tasks("train", 0))
    async with listener() as (site.elsewhere, received):
        answers = ["click 2", "click 1"]
        steps, outcome = await attempt(env.open(task), lambda messages, turn: says(answers[turn]))
        assert (outcome.reward, outcome.solved) == (1.0, True)
        assert "Refused, because it is outside the task" in steps[0].messages[0]["content"]
        assert received == []
        _, outcome = await attempt(env.open(task), lambda messages, turn: says("done"))
        assert (outcome.reward, outcome.solved) == (0.0, False)
    await env.close()


@pytest.mark.parametrize(
    ("url", "check", "sentence"),
    [
        ("http://127.0.0.1:1/", "true", "cannot be opened|no response|empty"),
        ("{site}", "nonsense(", "the check of the page failed"),
        ("{site}", "'yes'", "must give true, false or a number, not 'yes'"),
    ],
)
async def test_a_page_or_a_check_that_fails_is_not_the_fault_of_the_policy(
    site: Any, url: str, check: str, sentence: str
) -> None:
    env = make_browser(url=url.format(site=f"http://127.0.0.1:{site.server_port}/"), goal="Go on.", check=check)
    with pytest.raises(EnvFailed, match=sentence):
        await attempt(env.open(next(env.tasks("train", 0))), lambda messages, turn: says("click 1"))
    await env.close()

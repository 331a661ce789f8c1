"""The live page in a real browser, on a real server that learns: what happens appears without a reload.

Skipped where Playwright or Chromium is missing; `make test-browser` brings the first. Screenshots are left in the
folder that OPENCLAW_RL_SCREENSHOTS names, for people to look at.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.api.auth import ANYONE
from openclaw_rl.ledger import notes, practices
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.types import PracticeState
from support.browsing import needs_browser
from support.live_page import ALICE, LivePage, live_page
from support.lively_run import LOOKED, HalfWay, fill_page
from support.practice import begin
from support.process_stats import memory_mib
from support.server_program import SERVE, Program, serving

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = needs_browser
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)> \x1b[31m \u202eabc " + "א" * 50
VIEWS = (
    *("", "sessions", "sessions/1", "notes", "learning", "learning/12", "environments"),
    *(f"screenshots/{LOOKED}", "compare"),
)
SECONDS = 60_000
#: Contrast of all texts against what is behind them; returns those below the WCAG's bound.
FAINT_TEXTS = """() => {
  const rgb = (text) => { const [r, g, b, a] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a ?? 1]; };
  const linear = (v) => (v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  const behind = (element) => {
    let layers = [];
    for (let e = element; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    const mix = (under, [r, g, b, a]) => [r, g, b].map((v, i) => v * a + under[i] * (1 - a));
    return layers.reverse().reduce(mix, [255, 255, 255]);
  };
  const faint = [];
  for (const element of document.querySelectorAll("main *, header *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("svg, .sr, .skip, [hidden], progress") || !element.offsetParent) continue;
    const style = getComputedStyle(element);
    const [high, low] = [light(rgb(style.color)), light(behind(element))].sort((a, b) => b - a);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.6 && style.fontWeight >= 700);
    const words = element.textContent.trim().slice(0, 40);
    if ((high + .05) / (low + .05) < (large ? 3 : 4.5)) faint.push(`${words}: ${style.color} on ${behind(element)}`);
  }
  return faint;
}"""
#: Controls without a name, and pictures without a description.
UNNAMED = """() => {
  const controls = "button, a[href], input:not([type=hidden]), select, textarea, svg, img, progress, summary";
  const text = (e) => e.textContent.trim() || e.getAttribute("aria-label") || e.alt;
  return [...document.querySelectorAll(controls)]
    .filter((e) => !e.closest("[aria-hidden=true]") && e.getAttribute("aria-hidden") !== "true")
    .filter((e) => !(text(e) || e.querySelector("img")?.alt || e.labels?.[0]?.textContent.trim()))
    .map((e) => e.outerHTML.slice(0, 120));
}"""

FOCUSED = "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).trim()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        # Containers often allow no sandbox; the pages are the tests' own.
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that fails the test if the page complains or fetches something from elsewhere."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    page.on("request", lambda request: complaints.append(request.url) if "127.0.0.1" not in request.url else None)
    yield page
    context.close()
    assert [text for text in complaints if "401" not in text] == []


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LivePage]:
    app = {"operations": HalfWay(), "notes": NotesOptions()}
    with live_page(tiny_model, tmp_path_factory.mktemp("live"), **app) as page:
        fill_page(page)
        page.ledger.submit(notes.add, ANYONE, "Call the user Chef.").result(10)
        practised = {
            "Begin with a joke.": (
                PracticeState.STOPPED,
                "this model keeps to it in 2 of 64 answers; a larger model may",
            ),
            "Use an emoji.": (PracticeState.DONE, "without the note, 9 of 16 answers to other questions keep to it"),
            "Talk like a pirate.": (PracticeState.LEARNED, "without the note, 15 of 16 answers keep to it"),
            "End with a question.": (PracticeState.RUNNING, ""),
        }
        for number, (text, (state, reason)) in enumerate(practised.items(), 1):
            page.ledger.submit(begin, page.ledger.submit(notes.add, ANYONE, text).result(10).number).result(10)
            page.ledger.submit(practices.set_state, number, state, reason).result(10)
        pinned = page.ledger.submit(notes.add, ANYONE, HOSTILE[:300]).result(10)
        page.ledger.submit(lambda db: notes.edit(db, pinned.number, pinned=True)).result(10)
        page.ledger.submit(notes.add_example, ANYONE, "How does rain form?", "Chef, vapour cools and falls.").result(10)
        yield page


@pytest.fixture(scope="module")
def program(tiny_model: Path) -> Iterator[Program]:
    """A server that judges by rules and trains after two judged turns."""
    flags = ("--batch-size", "2", "--method", "rl", "--save-interval", "1", "--lora-rank", "4")
    with serving(SERVE, tiny_model, *flags) as program:
        yield program


def go(tab: Any, url: str, path: str) -> None:
    tab.goto(f"{url}/dashboard/{path}", wait_until="domcontentloaded")
    tab.wait_for_selector('.live[data-state="live"]', timeout=SECONDS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_every_view_fits_and_can_be_read(browser: Any, filled: LivePage, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = context.new_page()
    for path in VIEWS:
        go(tab, filled.url, path)
        if path == "sessions/1":
            tab.locator("summary", has_text="Tokens").first.click()
            tab.wait_for_selector(".tokens span[title]")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, f"{path} sticks out"
        for entry in tab.query_selector_all(".bar nav a"):
            box = entry.bounding_box()
            assert 0 <= box["x"] <= width - box["width"], f"{entry.inner_text()} is out of sight"
        assert tab.evaluate(FAINT_TEXTS) == []
        assert tab.evaluate(UNNAMED) == []
        assert tab.locator("h1").count() == 1
        if target := os.environ.get("OPENCLAW_RL_SCREENSHOTS"):
            name = path.replace("/", "-") or "now"
            tab.screenshot(path=Path(target) / f"live-{name}-{width}-{scheme}.png", full_page=True)
    context.close()


def test_everything_can_be_reached_with_the_keyboard(tab: Any, filled: LivePage) -> None:
    go(tab, filled.url, "sessions/1")
    reached = set()
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate(FOCUSED))
    assert {
        "Skip to content",
        "Now",
        "Sessions",
        "Notes",
        "Learning",
        "Forget",
        "Tokens",
        "Good answer",
        "Bad answer",
    } <= reached


def test_notes_are_written_changed_and_removed_and_answers_corrected(tab: Any, filled: LivePage) -> None:
    go(tab, filled.url, "notes")
    tab.locator("summary", has_text="Add a wish").click()
    tab.locator("input[name=text]").fill("Use metric units.")
    tab.locator("form", has=tab.locator("input[name=text]")).locator("button").click()
    wish = tab.locator("li.kept", has_text="Use metric units.")
    wish.wait_for(timeout=SECONDS)
    wish.locator("summary", has_text="Edit").click()
    wish.locator("textarea").fill("Use SI units.")
    wish.locator("button", has_text="Save").click()
    changed = tab.locator("li.kept", has_text="Use SI units.")
    changed.wait_for(timeout=SECONDS)
    changed.locator("button", has_text="Remove").click()
    tab.locator("dialog button", has_text=re.compile("Yes|Remove|OK", re.IGNORECASE)).last.click()
    changed.wait_for(state="detached", timeout=SECONDS)
    chef = tab.locator("li.kept", has_text="Call the user Chef.")
    chef.locator("button", has_text="Practise").click()
    chef.locator("text=waits to be practised").wait_for(timeout=SECONDS)
    # What the server does appears too.
    number = filled.ledger.read(practices.load_all)[0].number
    filled.ledger.submit(practices.set_state, number, PracticeState.RUNNING).result(10)
    chef.locator("text=is being practised").wait_for(timeout=SECONDS)
    chef.locator("button", has_text="Stop practice").click()
    chef.locator("text=practice stopped: by its owner").wait_for(timeout=SECONDS)
    chef.locator("button", has_text="Practise").wait_for(timeout=SECONDS)
    go(tab, filled.url, "sessions/1")
    tab.locator("summary", has_text="Write it as you want it").first.click()
    tab.locator("textarea[name=correction]").first.fill("Chef, as I want it.")
    tab.locator("button", has_text="Keep it").first.click()
    tab.locator("text=Kept as an example").first.wait_for(timeout=SECONDS)
    go(tab, filled.url, "notes")
    tab.locator("li.kept", has_text="Chef, as I want it.").wait_for(timeout=SECONDS)


def test_what_happens_appears_without_a_reload(tab: Any, program: Program) -> None:
    go(tab, program.url, "sessions")
    tab.evaluate("window.same = true")
    client = program.client
    messages: list[dict[str, str]] = [{"role": "user", "content": "Say something."}]
    settings = {**model_of(program), "max_tokens": 8, "extra_headers": {"X-Session-Id": "a"}}
    first = client.chat.completions.create(messages=messages, **settings)
    tab.wait_for_selector("text=Say something.", timeout=SECONDS)
    tab.click("text=Say something.")
    tab.wait_for_selector("text=waiting for what comes next")
    tab.evaluate("window.same = true")
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "No, that is wrong. Shorter!"})
    client.chat.completions.create(messages=messages, **settings)
    tab.wait_for_selector("text=No, that is wrong.", timeout=SECONDS)
    tab.wait_for_selector(".score.bad", timeout=SECONDS)
    # Feedback from the page makes the second sample, and with it the first step.
    rating = tab.locator("form.rate").last
    rating.locator("input[type=text]").fill("Answer in one word.")
    rating.locator("button[aria-label='Bad answer']").click()
    tab.wait_for_selector("text=Answer in one word.", timeout=SECONDS)
    tab.wait_for_selector("text=learned from", timeout=SECONDS)
    tab.wait_for_selector(".version:has-text('policy 1')", timeout=SECONDS)
    assert tab.evaluate("window.same"), "the page was loaded again"


def model_of(program: Program) -> dict[str, str]:
    models = httpx.get(f"{program.url}/v1/models").json()["data"]
    return {"model": models[0]["id"]}


def test_policies_are_compared_blindly_and_rolled_back(tab: Any, program: Program) -> None:
    go(tab, program.url, "compare")
    tab.fill("textarea", "Who are you?")
    tab.click("text=Ask both")
    tab.wait_for_selector("#vote:not([hidden])", timeout=SECONDS)
    assert tab.locator("#left").inner_text() or tab.locator("#right").inner_text()
    tab.click("#vote button:has-text('Left')")
    tab.wait_for_selector("#result:has-text('Your vote is recorded.')", timeout=SECONDS)
    assert {"the base model", "policy"} <= set(re.findall(r"the base model|policy", tab.inner_text("#result")))
    go(tab, program.url, "learning")
    tab.wait_for_selector("tr[id^=update-]")
    tab.click("text=Roll back to the base model")
    tab.click("dialog >> text=Cancel")
    assert tab.locator("dialog").count() == 0
    tab.click("text=Roll back to the base model")
    tab.click("dialog >> text=Yes, do it")
    tab.wait_for_selector("text=Rolled back", timeout=SECONDS)


def test_a_login_with_the_key(tab: Any, tmp_path: Path, tiny_model: Path) -> None:
    with live_page(tiny_model, tmp_path / "run", keys=(ALICE,)) as page:
        tab.goto(f"{page.url}/dashboard/sessions")
        tab.fill("input[name=key]", "wrong")
        tab.click("text=Log in >> nth=-1")
        tab.wait_for_selector("text=This key is not known")
        tab.fill("input[name=key]", ALICE.secret)
        tab.click("button:has-text('Log in')")
        tab.wait_for_selector('.live[data-state="live"]')
        assert tab.evaluate("document.cookie") == ""
        assert ALICE.secret not in str(tab.context.cookies())
        tab.click("text=Log out")
        tab.wait_for_selector("input[name=key]")


def test_hostile_words_stay_words(tab: Any, tmp_path: Path, tiny_model: Path) -> None:
    with live_page(tiny_model, tmp_path / "run") as page:
        go(tab, page.url, "sessions")
        page.say(HOSTILE, [{"role": "user", "content": HOSTILE}], {"X-Session-Id": "h"})
        tab.click("a.row")
        tab.wait_for_selector("article")
        tab.locator("summary", has_text="Tokens").first.click()
        tab.wait_for_selector(".tokens span[title]")
        assert tab.title() != "owned"
        assert tab.locator("main img").count() == 0
        assert "<script>document.title" in tab.inner_text("article")


@pytest.mark.skipif("OPENCLAW_RL_SOAK_SECONDS" not in os.environ, reason="make test-browser sets it")
def test_memory_stays_flat_while_the_page_is_open(tab: Any, program: Program) -> None:
    go(tab, program.url, "")
    rounds = int(os.environ["OPENCLAW_RL_SOAK_SECONDS"]) // 2
    sizes: list[tuple[float, float]] = []
    for number in range(rounds):
        messages = [{"role": "user", "content": f"Question {number}"}]
        program.client.chat.completions.create(messages=messages, max_tokens=4, **model_of(program))
        tab.wait_for_timeout(2000)
        sizes.append((memory_mib(program.process.pid), tab.evaluate("performance.memory.usedJSHeapSize")))
    (server, script), (server_then, script_then) = sizes[len(sizes) // 3], sizes[-1]
    assert server_then < server * 1.1 + 30
    assert script_then < script * 1.5 + 10e6

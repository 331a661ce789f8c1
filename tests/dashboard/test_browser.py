"""The pages in a real browser: nothing is complained about, nothing is fetched, and nothing sticks out of a phone.

Skipped where Playwright or Chromium is missing; `make test-browser` brings the first. Screenshots are left in the
folder that OPENCLAW_RL_SCREENSHOTS names, for people to look at.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.evals.page import write_page
from openclaw_rl.rendering.tokenizer import ChatTokenizer
from support.browsing import needs_browser
from support.judged_run import a_report, fill, write_metrics
from support.records import Book
from support.trials import learning

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = needs_browser
WORD = "<script>alert(1)</script></style> 🦞"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        # Containers often allow no sandbox; the pages are the tests' own.
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    trials = [
        learning(method, persona, seed)
        for method in ("combine", "rl")
        for persona in ("brief", "student")
        for seed in (0, 1)
    ]
    write_page(trials, folder / "demo.html", f"openclaw-rl demo {WORD}", WORD)
    book = Book(folder / "run")
    fill(book, ChatTokenizer(tiny_model), WORD)
    book.close()
    write_metrics(folder / "run", [a_report(step) for step in range(1, 30)])
    empty = folder / "empty"
    empty.mkdir()
    for run in (folder / "run", empty):
        assert main(["report", str(run), "--model-name", str(tiny_model), "--no-answers"]) == 0
    return {"demo": folder / "demo.html", "report": folder / "run" / "report.html", "empty": empty / "report.html"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("name", "width"), [("demo", 1200), ("demo", 390), ("report", 1200), ("report", 390), ("empty", 390)]
)
def test_a_page_opens_without_a_complaint(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    page.on("request", lambda request: asked.append(request.url))
    page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    page.goto(pages[name].as_uri())
    assert complaints == []
    assert [url for url in asked if not url.startswith("data:")] == [pages[name].as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it sticks out"
    if name != "empty":
        box = page.locator("svg").first.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 100
    colour, ground = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (lightness(ground) > lightness(colour)) == (scheme == "light")
    if target := os.environ.get("OPENCLAW_RL_SCREENSHOTS"):
        page.screenshot(path=Path(target) / f"{name}-{width}-{scheme}.png", full_page=True)
    context.close()


def lightness(colour: str) -> int:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

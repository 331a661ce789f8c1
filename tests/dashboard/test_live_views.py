"""The live page: each view shows what is recorded, as text, and only to its owner."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from openclaw_rl.app.answering import make_server
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.app.config import load
from openclaw_rl.dashboard.components.render import ASSETS, asset_url
from openclaw_rl.dashboard.live import pages
from openclaw_rl.dashboard.live.dashboard import LiveRun
from openclaw_rl.dashboard.live.routes import install
from openclaw_rl.lab.commands import new_folder
from openclaw_rl.ledger import episodes, training, turns
from openclaw_rl.ledger.screenshot_folders import folder_name
from openclaw_rl.types import EpisodeMode, EpisodeResult, SessionKey
from support.harness import Bench, running
from support.judged_run import a_report
from support.live_page import ALICE, BOB, LivePage, live_page
from support.lively_run import CONVERSATIONS, LOOKED, PICTURE, change, fill_page, keep_screenshots
from support.methods import a_method
from support.page_assertions import read_page
from support.records import a_turn

HOSTILE = "<script>alert(1)</script></main>\"'><img src=x onerror=alert(2)> \x1b[31mred\x1b[0m \u202eright to left"
VIEWS = ("", "sessions", "sessions/1", "learning", "learning/12", "environments", f"screenshots/{LOOKED}", "compare")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LivePage]:
    with live_page(tiny_model, tmp_path_factory.mktemp("live")) as page:
        fill_page(page)
        yield page


@pytest.fixture
def fresh(tmp_path: Path, tiny_model: Path) -> Iterator[LivePage]:
    with live_page(tiny_model, tmp_path / "run") as page:
        yield page


@pytest.mark.parametrize("path", VIEWS)
def test_every_view_is_a_page_with_strict_headers(filled: LivePage, path: str) -> None:
    with filled.visitor() as visitor:
        answer = visitor.get(path)
        assert answer.status_code == 200
        seen = read_page(answer.text)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["cache-control"] == "no-store"
    assert not any("style" in element.attributes for element in seen.elements), "the policy forbids inline styles"
    assert not seen.all("style")
    labels = [link.text for link in seen.all("a") if link.attributes.get("aria-current")]
    assert labels


def test_now_shows_where_the_run_stands(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        seen = visitor.see("")
    words = " ".join(seen.text.split())
    assert "Nothing is judged (--judge none)" in words
    assert "2 learned from" in words
    tiles = dict(zip([e.text for e in seen.all("dt")], [e.text.split()[0] for e in seen.all("dd")], strict=True))
    assert int(tiles["Requests"]) == 18
    assert tiles["Policy version"] == "0"
    assert len(seen.all("a", class_="row")) == pages.LATEST_SESSIONS


def test_a_session_is_a_chat_with_what_was_made_of_it(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        seen = visitor.see("sessions/1")
    words = " ".join(seen.text.split())
    for question, answer, _ in CONVERSATIONS["kitchen"]:
        assert words.count(question) == 1, "each message once"
        assert " ".join(answer.split()) in words
    assert "score -1 by llm teaches with score and hint" in words
    assert "Answer with the numbers only" in words
    assert "3 votes" in words
    thumbs = [button.attributes["aria-label"] for button in seen.all("button") if "aria-label" in button.attributes]
    waiting = sum(score is None for _, _, score in CONVERSATIONS["kitchen"])
    assert thumbs.count("Good answer") >= waiting


def test_tokens_show_probabilities_and_advantages(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        page = visitor.get("turns/1/tokens").text
    assert 'class="down a' in page
    assert "teacher" in page
    assert "advantage" in page
    assert "policy 61 %" in page, "e to the power of -0.5"


def test_steps_are_drawn_listed_and_opened(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        seen = visitor.see("learning")
        step = visitor.see("learning/12")
    labels = [chart.attributes["aria-label"] for chart in seen.all("svg", class_="chart")]
    assert any(label.startswith("Mean score of a step's turns, over 12 points") for label in labels)
    assert [row[0] for row in seen.rows()[1:]] == [str(number) for number in range(12, 0, -1)]
    assert "These turns made policy 12 from policy 11." in step.text
    assert CONVERSATIONS["kitchen"][0][0] in step.text


def test_groups_show_their_attempts(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        seen = visitor.see("environments")
    assert len(seen.all("li", id="group-1")) == 1
    attempts = [link for link in seen.all("a") if link.attributes.get("class", "").startswith("attempt")]
    assert [" ".join(link.text.split()) for link in attempts[:2]] == [
        "+1 reward +1, solved",
        "+0 reward +0, not solved",
    ]
    assert any(
        "mean of the last 16 episodes" in chart.attributes["aria-label"] for chart in seen.all("svg", class_="chart")
    )


def test_a_group_without_rewards_is_judged_by_nobody(fresh: LivePage) -> None:
    for name in ("a", "b"):
        change(fresh, episodes.begin, SessionKey("anyone", name), "header X-Session-Id", EpisodeMode.TRAIN)
        failed = EpisodeResult(error="it was stopped", group="g", group_size=2)
        change(fresh, episodes.end, SessionKey("anyone", name), failed, 2)
    change(fresh, episodes.settle_groups, 0, a_method("rl").why_untrained)
    with fresh.visitor() as visitor:
        (group,) = visitor.see("environments").all("li", id="group-1")
    assert "no reward" in group.text
    assert "being judged" not in group.text


def test_screenshots_are_shown_by_episode(fresh: LivePage) -> None:
    task = {"role": "user", "content": "Book a table."}
    fresh.say("click 1", [task], {"X-Session-Id": "browser-1-0", "X-Episode": "1"})
    change(fresh, episodes.end, SessionKey("anyone", "browser-1-0"), EpisodeResult(1.0, task="browser/shop"), 1)
    keep_screenshots(fresh, "browser-1-0", "002.png", "000.png", "001.png")
    keep_screenshots(fresh, "forgotten-1", "000.png")
    with fresh.visitor() as visitor:
        listed = visitor.see("environments")
        episode = visitor.see("sessions/1")
        looks = visitor.see("screenshots/browser-1-0")
    shown = {image.attributes["src"]: image.attributes["alt"] for image in listed.all("img")}
    assert shown == {
        "/dashboard/screenshots/browser-1-0/002.png": "The page: browser/shop: reward +1",
        "/dashboard/screenshots/forgotten-1/000.png": "The page: forgotten-1",
    }
    for seen in (episode, looks):
        sources = [image.attributes["src"] for image in seen.all("img")]
        assert sources == [f"/dashboard/screenshots/browser-1-0/00{number}.png" for number in range(3)]
    assert looks.all("a", href="/dashboard/sessions/1")


def test_a_session_with_an_odd_id_has_its_screenshots(fresh: LivePage) -> None:
    ids = ("a b/c", ".", "..", "../secret", "100%2f", '"quoted"\'', "日本", "x" * 300)
    for number, id in enumerate(ids, 1):
        change(fresh, turns.capture, [a_turn(id, "anyone")], "test", None, 0)
        # As the browser environment names it.
        folder = new_folder(fresh.folder / "screenshots" / folder_name(id))
        assert folder.parent.resolve() == fresh.folder / "screenshots"
        (folder / "000.png").write_bytes(PICTURE)
        with fresh.visitor() as visitor:
            (image,) = visitor.see(f"sessions/{number}").all("img")
            source = image.attributes["src"]
            assert source == f"/dashboard/screenshots/{folder.name}/000.png"
            assert visitor.http.get(source).content == PICTURE


def test_screenshots_of_the_run_can_be_looked_at_and_nothing_else(fresh: LivePage) -> None:
    keep_screenshots(fresh, "shop-1", "000.png", "notes.txt")
    keep_screenshots(fresh, "empty-1")
    (fresh.folder / "secret.png").write_bytes(b"secret")
    (fresh.folder / "screenshots" / "shop-1" / "003.png").symlink_to(fresh.folder / "nowhere")
    with fresh.visitor() as visitor:
        image = visitor.get("screenshots/shop-1/000.png")
        assert (image.content, image.headers["content-type"]) == (PICTURE, "image/png")
        assert image.headers["x-content-type-options"] == "nosniff"
        for path in (
            "shop-1/notes.txt",
            "shop-1/001.png",
            "shop-1/003.png",
            "..%2f/secret.png",
            "%2e%2e/secret.png",
            "shop-1/..%2f000.png",
        ):
            assert visitor.get(f"screenshots/{path}").status_code == 404
        for folder in ("none", "empty-1", "%2e%2e"):
            assert visitor.get(f"screenshots/{folder}").status_code == 404


def test_screenshots_are_for_the_operator(tmp_path: Path, tiny_model: Path) -> None:
    with live_page(tiny_model, tmp_path / "run", keys=(ALICE, BOB)) as page:
        keep_screenshots(page, "shop-1", "000.png")
        for key, status in ((None, 403), (BOB, 403), (ALICE, 200)):
            with page.visitor(key) as visitor:
                assert visitor.get("screenshots/shop-1/000.png").status_code == status
                if key:
                    assert visitor.get("screenshots/shop-1").status_code == status
                    assert bool(visitor.see("environments").all("img")) == (key is ALICE)


def test_what_people_and_models_wrote_is_text(fresh: LivePage) -> None:
    fresh.say(HOSTILE, [{"role": "user", "content": HOSTILE}], {"X-Session-Id": "h"})
    with fresh.visitor() as visitor:
        for path in ("", "sessions", "sessions/1"):
            page = visitor.get(path).text
            read_page(page)
            assert "<script>alert" not in page
            assert "<img" not in page
            assert "&lt;script&gt;alert(1)" in page
        assert "<script>alert" not in visitor.get("turns/1/tokens").text


def test_a_message_of_a_megabyte_is_cut(fresh: LivePage) -> None:
    messages = [{"role": "user", "content": "x y " * 250_000}]
    turn = a_turn(owner="anyone", messages=messages, message={"role": "assistant", "content": "é" * 500_000})
    change(fresh, turns.capture, [turn], "test", None, 0)
    with fresh.visitor() as visitor:
        assert len(visitor.get("sessions").text) < 10_000
        assert len(visitor.get("sessions/1").text) < 60_000


def test_sessions_are_paged_without_gaps(fresh: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "SESSIONS_ON_A_PAGE", 3)
    for number in range(7):
        fresh.say("hi", [{"role": "user", "content": f"hello {number}"}], {"X-Session-Id": f"s{number}"})
    listed: list[str] = []
    path: str | None = "sessions"
    with fresh.visitor() as visitor:
        while path:
            seen = visitor.see(path)
            listed += [row.attributes["id"] for row in seen.all("li") if "id" in row.attributes]
            older = seen.all("a", rel="next")
            path = older[0].attributes["href"].removeprefix("/dashboard/") if older else None
    assert listed == [f"session-{number}" for number in range(7, 0, -1)]


def test_turns_of_a_session_are_paged(fresh: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "TURNS_ON_A_PAGE", 2)
    messages: list[dict] = []
    for number in range(5):
        messages.append({"role": "user", "content": f"question {number}"})
        messages.append(fresh.say(f"answer {number}", messages, {"X-Session-Id": "s"}))
    with fresh.visitor() as visitor:
        newest = visitor.see("sessions/1")
        earlier = visitor.see(newest.all("a", rel="prev")[0].attributes["href"].removeprefix("/dashboard/"))
    assert [article.attributes["id"] for article in newest.all("article")] == ["turn-4", "turn-5"]
    assert [article.attributes["id"] for article in earlier.all("article")] == ["turn-2", "turn-3"]
    assert "question 3" in newest.text
    assert "question 2" not in newest.text, "each turn shows only what was new"


def test_a_script_gets_the_view_without_its_frame(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        part = visitor.get("sessions", **{"X-Part": "main"}).text
    assert '<nav aria-label="Views"' not in part
    assert part.lstrip().startswith('<span data-version="0">')


def test_unknown_things_are_pages_too(filled: LivePage) -> None:
    with filled.visitor() as visitor:
        for path in ("sessions/999", "learning/999", f"sessions/{10**17}"):
            answer = visitor.get(path)
            assert answer.status_code == 404
            assert "Not here" in read_page(answer.text).text
        assert visitor.get("turns/999/tokens").status_code == 404
        for path in ("sessions?after=x", "sessions?after=nan-1", "sessions?only=x", "sessions/1?before=-1"):
            assert visitor.get(path).status_code == 200


def test_assets_are_kept_for_good_under_an_address_of_their_content(filled: LivePage) -> None:
    for name, kind in ASSETS.items():
        answer = httpx.get(f"{filled.url}{asset_url(name)}")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "immutable" in answer.headers["cache-control"]
    assert httpx.get(f"{filled.url}/dashboard/assets/000000000000/style.css").status_code == 404
    assert httpx.get(f"{filled.url}/dashboard/assets/x/..%2frender.py").status_code == 404


def test_only_browsers_are_led_to_the_page(filled: LivePage) -> None:
    browser = httpx.get(filled.url, headers={"Accept": "text/html,application/xhtml+xml"})
    assert (browser.status_code, browser.headers["location"]) == (303, "/dashboard/")
    program = httpx.get(filled.url)
    assert program.status_code == 404
    assert program.json()["error"]["code"] == "unknown_url"
    foreign = httpx.get(f"{filled.url}/dashboard/", headers={"Host": "evil.example.org"})
    assert foreign.status_code == 403, "the page is as closed as the API"


def test_a_refused_step_says_why(fresh: LivePage) -> None:
    change(fresh, training.apply_step, 1, 1, [], a_report(1).as_json())
    change(fresh, training.quarantine, 2, [], "the gate: 0.40 of the prompts passed, 0.90 before the step")
    with fresh.visitor() as visitor:
        assert any("refused: the gate" in " ".join(row) for row in visitor.see("learning").rows())
        assert "the gate: 0.40" in visitor.see("").text


@pytest.mark.parametrize("wanted", [True, False])
def test_the_page_can_be_left_out(tiny_model: Path, tmp_path: Path, wanted: bool) -> None:
    config = load({"run_dir": tmp_path, "dashboard": wanted}, {}).config
    bench = Bench(tiny_model)
    server = make_server(config, bench.service, BackgroundLoops(None, None, 1.0), bench.sampler)
    bench.app = server.config.app
    with running(bench):
        assert httpx.get(f"{bench.url}/dashboard/").status_code == (200 if wanted else 404)
        html = httpx.get(bench.url, headers={"Accept": "text/html"})
        assert html.status_code == (303 if wanted else 404)


def test_a_server_that_records_nothing_says_so(tiny_model: Path) -> None:
    bench = Bench(tiny_model)
    install(bench.app, LiveRun(a_method("combine")))
    with running(bench):
        now = read_page(httpx.get(f"{bench.url}/dashboard/").text)
        assert "Nothing is recorded (--no-capture)" in now.text
        assert "First token after" in now.text
        sessions = httpx.get(f"{bench.url}/dashboard/sessions")
        assert sessions.status_code == 503
        assert "--no-capture" in sessions.text

"""The live page behind keys: who gets in, what they see, and that no other site can act for them."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from openclaw_rl.dashboard.live import access
from support.live_page import ALICE, BOB, LivePage, live_page
from support.page_assertions import read_page

BEARER = {"Authorization": f"Bearer {ALICE.secret}"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[LivePage]:
    with live_page(tiny_model, tmp_path_factory.mktemp("keys"), keys=(ALICE, BOB)) as page:
        for key, word in ((ALICE, "apples"), (BOB, "bananas")):
            headers = {"Authorization": f"Bearer {key.secret}", "X-Session-Id": word}
            page.say(f"I like {word}", [{"role": "user", "content": f"{word}?"}], headers)
        yield page


def test_nothing_is_shown_before_the_login(page: LivePage) -> None:
    with page.visitor() as visitor:
        for path in ("", "sessions", "sessions/1", "learning", "environments", "compare", "sessions?after=1-1"):
            answer = visitor.get(path)
            seen = read_page(answer.text)
            assert seen.all("input", name="key")
            assert "apples" not in answer.text
            assert visitor.get(path, **{"X-Part": "main"}).status_code == 401
        assert visitor.get("events").status_code == 401
        assert visitor.get("turns/1/tokens", **{"X-Part": "main"}).status_code == 401
        for action in ("feedback", "forget", "rollback", "compare", "vote"):
            assert visitor.do(action, token="x").status_code == 401
        # The API's own header does not open the page, and the page's cookie does not open the API.
        assert "apples" not in visitor.get("sessions", **BEARER).text


def test_a_wrong_key_is_refused(page: LivePage) -> None:
    with page.visitor() as visitor:
        for wrong in ("", "wrong", ALICE.secret[:-1], ALICE.secret + "x", "alice"):
            answer = visitor.log_in(wrong, next="/dashboard/sessions")
            assert answer.status_code == 401
            seen = read_page(answer.text)
            assert "not known" in seen.text
            assert seen.all("input", name="next", value="/dashboard/sessions")
            assert "set-cookie" not in answer.headers


def test_the_cookie_is_not_the_key_and_scripts_cannot_read_it(page: LivePage) -> None:
    with page.visitor() as visitor:
        answer = visitor.log_in(ALICE.secret, next="/dashboard/sessions")
        cookie = answer.headers["set-cookie"]
        assert ALICE.secret not in cookie
        assert {"httponly", "samesite=strict", "path=/dashboard"} <= set(cookie.lower().split("; "))
        assert answer.headers["location"] == "/dashboard/sessions"
        assert "apples" in visitor.see("sessions").text
        value = cookie.split(";")[0]
        api = httpx.post(f"{page.url}/v1/feedback", headers={"Cookie": value}, json={"id": "x", "score": 1})
        assert api.status_code == 401


@pytest.mark.parametrize(
    "target", ["https://evil.example.org/", "//evil.example.org/", "/v1/models", "javascript:alert(1)"]
)
def test_the_login_leads_only_to_our_own_pages(page: LivePage, target: str) -> None:
    with page.visitor() as visitor:
        assert visitor.log_in(ALICE.secret, next=target).headers["location"] == "/dashboard/"


def test_an_owner_sees_only_their_own(page: LivePage) -> None:
    with page.visitor(ALICE) as alice, page.visitor(BOB) as bob:
        for visitor, own, other, foreign in ((alice, "apples", "bananas", 2), (bob, "bananas", "apples", 1)):
            for path in ("", "sessions"):
                text = visitor.see(path).text
                assert own in text
                assert other not in text
            assert visitor.get(f"sessions/{foreign}").status_code == 404
            assert visitor.get(f"turns/{foreign}/tokens").status_code == 404
            assert visitor.do("feedback", turn=foreign, score=1).status_code == 404
            assert visitor.do("forget", session=foreign).status_code == 404


def test_only_the_operator_sees_what_concerns_all(page: LivePage) -> None:
    with page.visitor(ALICE) as alice, page.visitor(BOB) as bob:
        assert "Requests" in alice.see("").text
        assert "Requests" not in bob.see("").text
        for path in ("learning", "learning/1", "compare"):
            assert bob.get(path).status_code == 403
        assert alice.get("learning").status_code == 200
        assert "Learning" not in [link.text for link in bob.see("").all("a")]
        for action in ("rollback", "compare", "vote"):
            assert bob.do(action, version=0).status_code == 403


def test_a_change_needs_the_token_of_this_login(page: LivePage) -> None:
    with page.visitor(ALICE) as alice, page.visitor(ALICE) as other:
        assert alice.token != other.token
        for token in ("", "x", other.token):
            assert alice.do("feedback", token=token, turn=1, score=1).status_code == 403
        assert page.turns()[0].feedback == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example.org"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_site_cannot_ask_for_a_change(page: LivePage, headers: dict[str, str]) -> None:
    with page.visitor(ALICE) as alice:
        assert alice.do("feedback", headers=headers, turn=1, score=1).status_code == 403
        assert page.turns()[0].feedback == []
        refused = alice.http.post("/dashboard/login", data={"key": BOB.secret}, headers=headers)
        assert refused.status_code == 401, "nor log somebody in as somebody else"


def test_logging_out_ends_the_login(page: LivePage) -> None:
    with page.visitor(ALICE) as alice:
        cookie = dict(alice.http.cookies)
        assert alice.do("logout").status_code == 303
        assert "apples" not in alice.get("sessions").text
        again = httpx.get(f"{page.url}/dashboard/sessions", cookies=cookie)
        assert "apples" not in again.text, "the old cookie is worth nothing"


def test_an_idle_login_ends(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    with page.visitor(ALICE) as alice:
        assert "apples" in alice.get("sessions").text
        later = time.monotonic() + access.IDLE_SECONDS + 1
        monkeypatch.setattr(access.time, "monotonic", lambda: later)
        assert "apples" not in alice.get("sessions").text


def test_a_form_that_is_none_or_too_large_is_refused(page: LivePage) -> None:
    with page.visitor(ALICE) as alice:
        for body, status in ((b"\xff\xfe", 400), (b"&".join([b"a=1"] * 50), 400), (b"key=" + b"x" * 100_000, 413)):
            answer = alice.http.post("/dashboard/feedback", content=body, headers={"X-Part": "main"})
            assert answer.status_code == status
            assert answer.json()["message"]

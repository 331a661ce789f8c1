"""The live page behind keys: who gets in, what they see, and that no other site can act for them."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from openclaw_rl.api import auth
from openclaw_rl.api.options import ServerOptions
from openclaw_rl.dashboard.live import access, reads
from support.harness import wait_for
from support.live_page import ALICE, BOB, LivePage, live_page
from support.page_assertions import read_page
from support.raw_http import RawConnection, request_bytes

VIEWS = ("", "sessions", "sessions/1", "learning", "environments")
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


def test_one_owner_s_logins_and_pages_shut_nobody_else_out(page: LivePage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_LOGINS", 2)
    monkeypatch.setattr(reads, "MAX_PAGES", 2)
    with page.visitor(ALICE) as alice, page.visitor(BOB) as first, contextlib.ExitStack() as stack:
        for _ in range(3):
            last = stack.enter_context(page.visitor(BOB))
        assert "bananas" not in first.get("sessions").text, "the oldest of his own logins ends"
        assert "bananas" in last.get("sessions").text
        assert "apples" in alice.get("sessions").text
        for visitor in (last, alice):
            statuses = [stack.enter_context(visitor.http.stream("GET", "/dashboard/events")).status_code for _ in "123"]
            assert statuses == [200, 200, 429]


LONG = "9" * 5000
BEYOND = str(2**63)


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        *((f"sessions/{number}", {}) for number in (LONG, BEYOND)),
        *((f"turns/{number}/tokens", {}) for number in (LONG, BEYOND)),
        *((f"learning/{number}", {}) for number in (LONG, BEYOND)),
        *((f"learning/{number}/again/{number}", {}) for number in (LONG, BEYOND)),
        *(
            (f"{view}?before={number}&after=1-{number}&since={number}", {})
            for view in VIEWS
            for number in (LONG, BEYOND)
        ),
        ("sessions?before=\ud800", {}),
        ("assets/x/page.js?\ud800", {}),
        ("nothing?\ud800", {}),
        (f"screenshots/{'x' * 300}", {}),
        (f"screenshots/{'x' * 5000}/1.png", {}),
        ("learning/1/again/1", {"Origin": "http://["}),
    ],
)
async def test_no_address_is_an_error_of_the_server(page: LivePage, path: str, headers: dict[str, str]) -> None:
    with page.visitor(ALICE) as alice:
        cookie = "; ".join(f"{name}={value}" for name, value in alice.http.cookies.items())
    for own in ({"Cookie": cookie}, {}):
        connection = RawConnection(httpx.URL(page.url).port or 80)
        # Bytes as they are: a client's library would refuse to send some of them.
        request = request_bytes("GET", f"/dashboard/{path}", {"Host": "127.0.0.1", **own, **headers}, b"")
        answer = await connection.exchange(request)
        await connection.close()
        assert answer.status < 500


@pytest.mark.parametrize("headers", [{"Origin": "http://["}, {"Referer": "http://["}])
def test_no_header_of_a_form_is_an_error_of_the_server(page: LivePage, headers: dict[str, str]) -> None:
    page.say("I like pears", [{"role": "user", "content": "pears?"}], BEARER)
    with page.visitor(ALICE) as alice:
        form = {"token": alice.token, "turn": page.turns()[-1].number, "score": 1}
        for action in ("feedback", "compare", "logout", "login"):
            assert alice.http.post(f"/dashboard/{action}", data=form, headers=headers).status_code < 500
    with page.visitor(ALICE) as alice:
        for number in (LONG, BEYOND):
            assert alice.do("feedback", turn=number, score=1).status_code == 400


@pytest.mark.parametrize("last", [LONG, BEYOND, "-1", "x"])
def test_a_page_follows_the_changes_whatever_it_heard_last(page: LivePage, last: str) -> None:
    events, heard = "/dashboard/events", {"Last-Event-ID": last}
    with page.visitor(ALICE) as alice, alice.http.stream("GET", events, headers=heard) as stream:
        assert stream.status_code == 200
        assert "event: change" in next(text for text in stream.iter_text() if "event" in text)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/notes",
        pytest.param("/readyz", marks=pytest.mark.more),
        pytest.param("/dashboard/login", marks=pytest.mark.more),
    ],
)
def test_who_tries_wrong_keys_has_to_wait_and_nobody_else(
    page: LivePage, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(auth, "FREE_TRIES", 1)
    ended: dict[str, float] = {}

    def send(secret: str) -> None:
        if path == "/dashboard/login":
            httpx.post(page.url + path, data={"key": secret})
        else:
            httpx.get(page.url + path, headers={"Authorization": f"Bearer {secret}"})
        ended[secret] = time.monotonic()

    wrong = [f"wrong-{number}" for number in range(4)]
    started = time.monotonic()
    with ThreadPoolExecutor(5) as threads:
        tries = [threads.submit(send, secret) for secret in wrong]
        wait_for(lambda: bool(ended))
        threads.submit(send, BOB.secret).result()
        assert len(ended) < 5, "the right key overtakes the wrong ones"
        for one in tries:
            one.result()
    assert max(ended.values()) - started > 2.9 * auth.TRY_SECONDS


@pytest.mark.parametrize("sent", ["x:y", "2001:db8::1::2", "1.2.3.4:x", "z" * 4000, "fe80::1%eth0"])
def test_a_wrong_key_is_refused_whatever_a_proxy_says_of_its_address(page: LivePage, sent: str) -> None:
    headers = {"Authorization": "Bearer wrong", "X-Forwarded-For": sent}
    assert httpx.get(page.url + "/v1/notes", headers=headers).status_code == 401
    assert len(auth.source_of({"client": (sent, 0)})) < 50


async def test_what_is_kept_of_wrong_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(scope: Scope, _receive: Receive, send: Send) -> None:
        scope[auth.WRONG_KEY] = True
        await send({"type": "http.response.start", "status": 401})

    async def ask(address: str) -> float:
        started = time.monotonic()
        await slow({"type": "http", "client": (address, 1)}, None, noted)  # type: ignore[arg-type]
        return time.monotonic() - started

    async def noted(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    slow = auth.SlowGuesses(refuse)
    assert ServerOptions().max_connections_per_address > 2 * auth.MAX_WAITING, "others have connections too"
    monkeypatch.setattr(auth, "MAX_SOURCES", 3)
    monkeypatch.setattr(auth, "MAX_WAITING", 2)
    monkeypatch.setattr(auth, "MAX_WAIT_SECONDS", 0.2)
    for number in range(10):
        await ask(f"10.0.0.{number}")
    assert len(slow._next_answer) == 3
    # One network of IPv6 is one source, and no crowd is kept waiting.
    waits = await asyncio.gather(*(ask(f"2001:db8::{number:x}") for number in range(20)))
    assert sum(wait > 0.1 for wait in waits) == 2
    assert len(sent) == 30

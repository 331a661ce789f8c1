"""The client for a running server: what it sends, and that every failure is a sentence."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from openclaw_rl.api.options import ApiKey
from openclaw_rl.client import GIVE_KEY, Client, Retries, ServerError, ready_state, retry_after
from openclaw_rl.evals.chat import Chat
from support.harness import Bench, running

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever asks through the proxy gets no answer."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{taken.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield


def test_an_answer_comes_in_pieces(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as bench, Client(bench.url) as client:
        pieces = [delta.get("content") or "" for delta in client.chat(HELLO)]
    assert "".join(pieces) == "hello world"
    assert len(pieces) > 2


def test_a_server_says_how_it_is(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as bench, Client(bench.url) as client:
        state = client.ready()
        assert (state["ready"], state["policy_version"], state["learner"]) == (True, 0, "off")
        url = bench.url
    assert ready_state(url) == {}


def test_a_server_with_keys_says_how_it_is_to_those_who_have_one(tiny_model: Path) -> None:
    with running(Bench(tiny_model, keys=ApiKey.parse_all("S3CRET"))) as bench:
        with Client(bench.url, "S3CRET") as client:
            assert client.ready()["learner"] == "off"
        assert ready_state(bench.url, "wrong") == ready_state(bench.url) == {"ready": True}


def test_a_refusal_is_the_servers_own_sentence(tiny_model: Path) -> None:
    sentence = r"^This server does not learn, so there is nothing to roll back\.$"
    with running(Bench(tiny_model)) as bench, Client(bench.url) as client:
        with pytest.raises(ServerError, match=sentence) as refusal:
            client.roll_back(None)
        assert refusal.value.is_refusal


def test_an_error_of_another_shape_is_repeated_in_part() -> None:
    bench = Bench.__new__(Bench)
    bench.app = Starlette(
        routes=[Route("/v1/policy/rollback", lambda _: Response("<html>" * 99, 502), methods=["POST"])]
    )
    with running(bench), Client(bench.url) as client:
        with pytest.raises(ServerError, match=r"^(<html>)+<h$") as refusal:
            client.roll_back(1)
        assert refusal.value.is_refusal


def test_a_key_is_sent_and_a_missing_one_is_asked_for(tiny_model: Path) -> None:
    with running(Bench(tiny_model, keys=ApiKey.parse_all("S3CRET"))) as bench:
        for key in ("", "wrong"):
            with Client(bench.url, key) as client, pytest.raises(ServerError, match=GIVE_KEY) as refusal:
                list(client.chat(HELLO))
            assert not refusal.value.is_refusal
        with Client(bench.url, "S3CRET\n") as client:
            assert list(client.chat(HELLO))


def test_a_server_that_is_gone_is_a_sentence() -> None:
    with Client("http://127.0.0.1:1") as client:
        with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1 .*running\?$") as failure:
            client.roll_back(None)
        assert not failure.value.is_refusal


async def test_evaluations_ask_their_own_server_without_the_proxy(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as bench:
        async with Chat(bench.url) as chat:
            assert (await chat.ask(HELLO)).text == "hello world"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *[("3", 3), ("0.5", 0.5), ("-3", 0), ("1e9", 1e9), ("nan", None), ("inf", None), ("soon", None), ("", None)],
        *[("Wed, 21 Oct 2015 07:28:00 GMT", 0), ("Wed, 99 Oct 2015 07:28:00 GMT", None)],
    ],
)
def test_how_long_a_server_wants_to_be_left_alone(given: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": given}) == seconds


def test_a_server_that_does_not_say_how_long() -> None:
    assert retry_after({}) is None


@pytest.mark.parametrize(
    ("header", "attempts", "least", "most"),
    [
        ("3", 1, 3, 3.75),
        ("9999", 1, 30, 37.5),
        ("-1", 1, 0, 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 2, 0, 0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 2, 30, 37.5),
        ("nan", 1, 0.5, 0.625),
        ("", 3, 2, 2.5),
        ("", 1_000_000, 30, 37.5),
    ],
)
def test_pauses(header: str, attempts: int, least: float, most: float) -> None:
    assert least <= Retries().pause(attempts, retry_after({"retry-after": header})) <= most


@pytest.mark.parametrize(
    ("failure", "again"),
    [
        (ServerError("", status=429), [Retries(2), Retries(2, broken=True), Retries(2, unsent=True)]),
        (ServerError("", status=500), [Retries(2, statuses=range(500, 600))]),
        (ServerError("", was_sent=False), [Retries(2, unsent=True)]),
        (ServerError(""), [Retries(2, broken=True)]),
    ],
)
def test_what_is_sent_again(failure: ServerError, again: list[Retries]) -> None:
    policies = [Retries(2), Retries(2, broken=True), Retries(2, unsent=True), Retries(2, statuses=range(500, 600))]
    assert [policy for policy in policies if policy.cover(failure, 1)] == again
    assert not any(policy.cover(failure, 2) for policy in policies)

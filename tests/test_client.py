"""The client for a running server: what it sends, and that every failure is a sentence."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from openclaw_rl.api.options import ApiKey
from openclaw_rl.client import GIVE_KEY, Client, ServerGone, ServerRefused, ready_state
from openclaw_rl.errors import UserError
from openclaw_rl.evals.chat import ChatFailed, HttpChat
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
    with running(Bench(tiny_model)) as bench, Client(bench.url) as client, pytest.raises(ServerRefused, match=sentence):
        client.roll_back(None)


def test_an_error_of_another_shape_is_repeated_in_part() -> None:
    bench = Bench.__new__(Bench)
    bench.app = Starlette(
        routes=[Route("/v1/policy/rollback", lambda _: Response("<html>" * 99, 502), methods=["POST"])]
    )
    with running(bench), Client(bench.url) as client, pytest.raises(ServerRefused, match=r"^(<html>)+<h$"):
        client.roll_back(1)


def test_a_key_is_sent_and_a_missing_one_is_asked_for(tiny_model: Path) -> None:
    with running(Bench(tiny_model, keys=ApiKey.parse_all("S3CRET"))) as bench:
        for key in ("", "wrong"):
            with Client(bench.url, key) as client, pytest.raises(UserError, match=GIVE_KEY) as refusal:
                list(client.chat(HELLO))
            assert not isinstance(refusal.value, ServerRefused)
        with Client(bench.url, "S3CRET\n") as client:
            assert list(client.chat(HELLO))


def test_a_server_that_is_gone_is_a_sentence() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(ServerGone, match=r"http://127\.0\.0\.1:1 .*running\?$"):
        client.roll_back(None)


async def test_evaluations_ask_their_own_server_without_the_proxy(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as bench:
        async with HttpChat(bench.url, local=True) as chat:
            assert (await chat.ask(HELLO)).text == "hello world"
        async with HttpChat(bench.url) as chat:
            with pytest.raises(ChatFailed):
                await chat.ask(HELLO)

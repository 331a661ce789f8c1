"""`--allow-origin`: pages of the named origins may use the server from a browser, others may not."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from openclaw_rl.api.options import ApiKey, ServerOptions
from support.harness import Bench, running

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
WANTED = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.fixture(scope="module", params=[(), (ApiKey("alice", "s3cret"),)], ids=["no key", "key"])
def bench(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Bench]:
    with running(Bench(tiny_model, keys=request.param, origins=[PAGE])) as bench:
        yield bench


def test_a_named_page_may_ask_and_read(bench: Bench) -> None:
    preflight = httpx.options(f"{bench.url}/v1/chat/completions", headers={"Origin": PAGE, **WANTED})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    for path, body in (("chat/completions", HELLO), ("messages", HELLO), ("responses", {"input": "hello"})):
        answer = bench.send(path, body, Origin=PAGE, Authorization="Bearer s3cret")
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE


def test_a_refusal_can_be_read_too(bench: Bench) -> None:
    refused = bench.send("chat/completions", {}, Origin=PAGE, Authorization="Bearer s3cret")
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, PAGE)


def test_another_page_may_not_read(bench: Bench) -> None:
    preflight = httpx.options(f"{bench.url}/v1/chat/completions", headers={"Origin": OTHER, **WANTED})
    assert preflight.status_code == 400
    answer = bench.send("chat/completions", HELLO, Origin=OTHER, Authorization="Bearer s3cret")
    assert "access-control-allow-origin" not in answer.headers


def test_without_a_key_another_page_is_refused(tiny_model: Path) -> None:
    with running(Bench(tiny_model, origins=[PAGE])) as bench:
        assert bench.post(HELLO, Origin=OTHER).json()["error"]["code"] == "foreign_origin"
        assert bench.post(HELLO, Origin=PAGE, Host="elsewhere.org").json()["error"]["code"] == "foreign_host"


@pytest.mark.parametrize(
    ("origins", "problem"),
    [
        ("*", "any page"),
        ("chat.example.org", "begin with http"),
        ("https://chat.example.org/app", "no path"),
    ],
)
def test_origins_are_checked_at_the_start(origins: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ServerOptions(allow_origin=origins)


def test_origins_are_a_list() -> None:
    options = ServerOptions(allow_origin=f"{PAGE}, http://localhost:3000/")
    assert options.allowed_origins == (PAGE, "http://localhost:3000")
    assert ServerOptions(allow_origin="*", api_key="s3cret").allowed_origins == ("*",)
    assert ServerOptions().allowed_origins == ()

"""Without a key, pages from elsewhere cannot use the server through the browser of its owner."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import load_turn, open_conversations
from support.harness import Bench, running

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
POSTS = ("/v1/chat/completions", "/v1/feedback", "/v1/policy/rollback", "/v1/sessions/s/close")
GETS = ("/v1/models", "/v1/models/tiny", "/healthz", "/readyz", "/metrics", "/openapi.json")
OWN_NAMES = ("localhost", "LocalHost:30000", "127.0.0.1", "127.8.9.1:30000", "[::1]", "[::1]:30000")
FOREIGN_NAMES = (
    "evil.example",
    "evil.example:30000",
    "127.0.0.1.evil.example",
    "localhost.evil.example:30000",
    "localhost@evil.example",
    "10.0.0.1",
    "0.0.0.0:30000",
    "[::2]:30000",
    "[::1",
    "",
)


@pytest.fixture(scope="module")
def bench(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    ledger = Ledger(tmp_path_factory.mktemp("ledger"))
    with running(Bench(tiny_model, ledger)) as bench:
        yield bench
    ledger.close()


@pytest.fixture(scope="module")
def client(bench: Bench) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=bench.url) as client:
        yield client


def refused(response: httpx.Response, code: str) -> None:
    """Refused with OpenAI's shape and a sentence that says what to do."""
    problem = response.json()["error"]
    assert (response.status_code, problem["code"]) == (403, code)
    assert "--api-key" in problem["message"]


def test_a_page_cannot_judge_an_answer(bench: Bench, client: httpx.Client) -> None:
    """As pages can without asking the browser: plain text, under a name that was made to point to this machine."""
    answer = bench.post(HELLO).json()["id"]
    judgement = json.dumps({"id": answer, "thumb": "down"})
    page = {"Content-Type": "text/plain", "Origin": "https://evil.example"}
    refused(client.post("/v1/feedback", content=judgement, headers=page), "foreign_origin")
    page["Host"] = "evil.example"
    refused(client.post("/v1/feedback", content=judgement, headers=page), "foreign_host")
    assert bench.service.capture is not None
    ledger = bench.service.capture.ledger
    assert ledger.read(load_turn, ledger.read(open_conversations, 1)[0][0]).feedback == []
    own = {"Content-Type": "application/x-www-form-urlencoded", "Origin": bench.url}
    assert client.post("/v1/feedback", content=judgement, headers=own).status_code == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://127.0.0.1.evil.example:30000", "null", "", "file://", "http://[::1"]
)
def test_nothing_is_taken_from_pages_elsewhere(bench: Bench, client: httpx.Client, path: str, origin: str) -> None:
    sampled = len(bench.sampler.requests)
    refused(client.post(path, json=HELLO, headers={"Origin": origin}), "foreign_origin")
    refused(client.options(path, headers={"Origin": origin}), "foreign_origin")
    assert len(bench.sampler.requests) == sampled


@pytest.mark.parametrize("origin", [f"http://{name}" for name in OWN_NAMES] + ["https://localhost"])
def test_pages_of_this_machine_are_served(bench: Bench, origin: str) -> None:
    assert bench.post(HELLO, Origin=origin).status_code == 200


@pytest.mark.parametrize("host", FOREIGN_NAMES)
def test_a_name_that_is_not_this_machine_s_is_refused_everywhere(client: httpx.Client, host: str) -> None:
    for path in GETS:
        refused(client.get(path, headers={"Host": host}), "foreign_host")
    for path in (*POSTS, "/v1/nothing"):
        refused(client.post(path, json=HELLO, headers={"Host": host}), "foreign_host")


@pytest.mark.parametrize("host", OWN_NAMES)
def test_every_name_of_this_machine_will_do(client: httpx.Client, host: str) -> None:
    assert client.post(POSTS[0], json=HELLO, headers={"Host": host}).status_code == 200
    for path in GETS:
        assert client.get(path, headers={"Host": host}).status_code == 200


def test_a_key_opens_the_server_to_every_name_and_page(tiny_model: Path) -> None:
    elsewhere = {"Host": "my.example", "Origin": "https://chat.example"}
    with running(Bench(tiny_model, keys=[ApiKey("alice", "s3cret")])) as bench:
        assert bench.post(HELLO, **elsewhere, Authorization="Bearer s3cret").status_code == 200
        assert bench.post(HELLO, **elsewhere).status_code == 401
        assert httpx.get(f"{bench.url}/v1/models", headers=elsewhere).status_code == 200

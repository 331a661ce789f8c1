"""Clients that hold conversations with a server, and the check that the ledger has what they received."""

import contextlib
import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.ledger.schema import connect
from openclaw_rl.ledger.turns import load_turn, turn_numbers
from support.server_program import SECONDS


def talk(url: str, seed: int, received: dict[str, str], stop: threading.Event) -> None:
    """Hold conversations, streamed and not, until `stop` or the server ends; note each answer that came whole."""
    rng = random.Random(seed)
    messages = [{"role": "user", "content": f"hello {seed}"}]
    with httpx.Client(base_url=url, timeout=SECONDS) as client, contextlib.suppress(httpx.TransportError, OSError):
        while not stop.is_set():
            ask = {"messages": messages, "max_tokens": rng.randint(1, 12), "stream": rng.random() < 0.5}
            answer = client.post("/v1/chat/completions", json=ask)
            id, content = whole_answer(answer.text, ask["stream"])
            if id is not None:
                received[id] = content
            reply = {"role": "assistant", "content": content}
            again = [*messages, reply, {"role": "user", "content": rng.choice(["more", "no", "thanks"])}]
            messages = again if len(again) < 12 else messages[:1]


def whole_answer(text: str, stream: bool) -> tuple[str | None, str]:
    """The id of an answer that came whole, and its text."""
    if not stream:
        body = json.loads(text)
        return body["id"], body["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    content = "".join(choice["delta"].get("content") or "" for e in events for choice in e["choices"])
    return (events[0]["id"] if text.endswith("data: [DONE]\n\n") else None), content


def assert_recorded(ledger: Path, received: dict[str, str]) -> None:
    """Check that a ledger is whole and has every answer that a client received whole."""
    with contextlib.closing(connect(ledger)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        turns = [load_turn(db, number) for number in turn_numbers(db)]
    assert all(len(turn.logprobs) == len(turn.response_ids) > 0 for turn in turns)
    recorded = {turn.completion: turn.message["content"] for turn in turns}
    assert {id: recorded.get(id) for id in received} == received


def ask(url: str, **given: Any) -> dict[str, Any]:
    """The answer to a short request."""
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, **given}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def rate(url: str, id: str, score: float) -> None:
    """Explicit feedback on an answer."""
    response = httpx.post(f"{url}/v1/feedback", json={"id": id, "score": score}, timeout=60)
    assert response.status_code == 200, response.text

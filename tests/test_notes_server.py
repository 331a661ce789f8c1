"""Notes through the whole program: said, given from the cache, accepted, distilled in a step, and safe from kill -9."""

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.records import stored_turns
from support.server_program import SECONDS, SERVE, Program, serving, until

FLAGS = ("--method", "notes", "--judge", "feedback", "--batch-size", "2", "--lora-rank", "4", "--kv-cache-gib", "0.1")
#: Accepted answers would be given as examples too.
NO_EXAMPLES = ("--examples", "0")
#: Tokens are cached in pages of this size.
PAGE = 16


def ask(program: Program, *messages: tuple[str, str]) -> dict[str, Any]:
    chat = [{"role": role, "content": content} for role, content in messages]
    body = {"messages": chat, "max_tokens": 6, "seed": len(messages)}
    answer = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def rate(program: Program, answer: dict[str, Any], **feedback: Any) -> None:
    sent = httpx.post(f"{program.url}/v1/feedback", json={"id": answer["id"], **feedback}, timeout=SECONDS)
    assert sent.status_code == 200, sent.text


def notes(program: Program, kind: str = "note") -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = httpx.get(f"{program.url}/v1/notes", timeout=SECONDS).json()["data"]
    return [one for one in listed if one["object"] == kind]


def test_a_wish_is_used_at_once_and_learned(tiny_model: Path, tmp_path: Path) -> None:
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path), *FLAGS, *NO_EXAMPLES) as program:
        first = ask(program, ("user", "hello"))
        rate(program, first, thumb="down", text="Shorter, please.")
        until(lambda: len(notes(program)) == 1, program)
        for number in range(2):
            question = ("user", f"what is the answer {number}?")
            answer = ask(program, question)
            assert answer["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + 10, "the note is in it"
            said = ("assistant", answer["choices"][0]["message"]["content"])
            usage = ask(program, question, said, ("user", "and the fox?"))["usage"]
            known = answer["usage"]["total_tokens"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= (known - 1) // PAGE * PAGE
            rate(program, answer, thumb="up")
        until(lambda: (tmp_path / "metrics.jsonl").is_file(), program)
        (note,) = notes(program)
        assert note["held"] == {"given": 2, "withheld": 0}
        program.process.kill()
    step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (step["samples"], step["notes"]) == (2, 2)
    noted = [turn for turn in stored_turns(tmp_path) if turn.plain_ids is not None]
    assert len(noted) == 4
    for turn in noted:
        assert turn.plain_ids is not None
        assert [one.text for one in turn.notes] == [note["text"]]
        assert len(turn.plain_ids) < len(turn.prompt_ids)


@pytest.mark.more
def test_a_correction_that_was_taken_survives_kill_9(tiny_model: Path, tmp_path: Path) -> None:
    """Its feedback and its example are there, both or neither, and the next conversation is shown it."""
    arguments = (SERVE, tiny_model, "--run-dir", str(tmp_path), *FLAGS)
    with serving(*arguments) as program:
        plain = ask(program, ("user", "where is the fox?"))
        rate(program, plain, correction="Chef, the fox is in the wood.")
        lost = ask(program, ("user", "where is the hen?"))
        with httpx.Client(timeout=SECONDS) as client, contextlib.suppress(httpx.HTTPError):
            threading.Timer(0.002, program.process.kill).start()
            client.post(f"{program.url}/v1/feedback", json={"id": lost["id"], "correction": "Chef, in the barn."})
        program.process.wait(SECONDS)
    with serving(*arguments) as program:
        kept = {one["question"]: one["text"] for one in notes(program, "example")}
        assert kept["where is the fox?"] == "Chef, the fox is in the wood."
        corrected = {turn.completion: [said.correction for said in turn.feedback] for turn in stored_turns(tmp_path)}
        assert corrected[lost["id"]] == [kept[asked] for asked in kept if asked == "where is the hen?"]
        again = ask(program, ("user", "where is the owl?"))
        assert again["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 10, "the examples are in it"

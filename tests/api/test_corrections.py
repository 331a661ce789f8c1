"""Corrections on every wire, and examples in any order of conversations: nobody sees another's, prompts only grow."""

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from support.properties import examples
from support.recording import HEADERS, Recording

WIRES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "where is the fox?"}]},
    "messages": {"messages": [{"role": "user", "content": "where is the fox?"}], "max_tokens": 20},
    "responses": {"input": "where is the fox?"},
}


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_of_any_wire_is_corrected_by_its_id(noting: Recording, wire: str) -> None:
    noting.says = "In the wood."
    answer = httpx.post(f"{noting.url}/v1/{wire}", json={"model": "tiny", **WIRES[wire]}, headers=HEADERS["sam"])
    assert answer.status_code == 200, answer.text
    body = {"id": answer.json()["id"], "correction": "Chef, in the wood."}
    assert httpx.post(f"{noting.url}/v1/feedback", json=body, headers=HEADERS["kim"]).status_code == 404
    assert httpx.post(f"{noting.url}/v1/feedback", json=body, headers=HEADERS["sam"]).status_code == 200
    listed = httpx.get(f"{noting.url}/v1/notes", headers=HEADERS["sam"]).json()["data"]
    assert [(one["object"], one["question"], one["text"], one["origin"]) for one in listed] == [
        ("example", "where is the fox?", "Chef, in the wood.", "corrected")
    ]
    assert httpx.get(f"{noting.url}/v1/notes", headers=HEADERS["kim"]).json()["data"] == []


STEPS = st.lists(
    st.tuples(st.sampled_from([*HEADERS]), st.sampled_from(["new", "go on", "correct", "note"]), st.integers(0, 4)),
    max_size=14,
)


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_nobody_sees_anothers_examples_and_prompts_only_grow(
    noting: Recording, steps: list[tuple[str, str, int]]
) -> None:
    noting.empty()
    talks: dict[str, list[dict[str, str]]] = {owner: [] for owner in HEADERS}
    for number, (owner, step, word) in enumerate(steps):
        if step == "note":
            body = {"text": f"Say {owner}{number}.", "pinned": bool(word % 2)}
            httpx.post(f"{noting.url}/v1/notes", json=body, headers=HEADERS[owner]).raise_for_status()
            continue
        if step == "correct" and talks[owner]:
            body = {"id": noting.last_id, "correction": f"{owner} wants {number}"}
            httpx.post(f"{noting.url}/v1/feedback", json=body, headers=HEADERS[owner])
            continue
        asked = {"role": "user", "content": f"what is {word} of {owner}?"}
        talk = [*(talks[owner] if step == "go on" else []), asked]
        talks[owner] = [*talk, noting.say(f"it is {word}", talk, HEADERS[owner])]
    backend = noting.renderer.tokenizer.backend
    turns = {turn.number: turn for turn in noting.turns()}
    for turn in turns.values():
        (other,) = HEADERS.keys() - {turn.session.owner}
        assert other not in backend.decode(turn.prompt_ids), "a prompt has the words of another owner"
        assert turn.plain_ids is None or len(turn.plain_ids) < len(turn.prompt_ids)
    for before, after in growing(turns.values()):
        whole = [*before.prompt_ids, *before.response_ids]
        assert after.prompt_ids[: len(whole)] == whole


def growing(turns: Any) -> Iterator[tuple[Any, Any]]:
    """Turns, each with one that continues it."""
    listed = list(turns)
    for before, after in itertools.combinations(listed, 2):
        continues = [*before.messages, before.message] == after.messages[: len(before.messages) + 1]
        if continues and before.session == after.session:
            yield before, after

"""`GET` and `DELETE /v1/responses/{id}`: recorded answers are read and deleted by their owner, one at a time."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.ledger import packing, sessions, turns, verdicts
from openclaw_rl.types import (
    Feedback,
    HeardWishes,
    Hint,
    Question,
    SampleKind,
    SampleRequest,
    Source,
    State,
    Verdict,
    Vote,
    Wish,
)
from support.fakes import ScriptedStream
from support.harness import MODEL, Bench, running
from support.recording import Recording

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    keys = ApiKey.parse_all("alice=A,bob=B")
    with running(Recording(tiny_model, tmp_path_factory.mktemp("ledger"), keys=keys)) as bench:
        yield bench  # type: ignore[misc]
        bench.ledger.close()  # type: ignore[attr-defined]


@pytest.fixture
def bench(shared: Recording) -> Recording:
    shared.empty()
    shared.says = "hello world"
    return shared


def client(bench: Bench, key: str = "A") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{bench.url}/v1", api_key=key, max_retries=0)


def given(bench: Recording, body: dict[str, Any]) -> dict[str, Any]:
    """The response to a request of alice's: the whole one, or that of a stream's last event."""
    answer = bench.send("responses", {"input": "hello", **body}, Authorization="Bearer A")
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")][-1]
    return json.loads(last)["response"]


def read_again(bench: Recording, id: str) -> dict[str, Any]:
    return httpx.get(f"{bench.url}/v1/responses/{id}", headers={"Authorization": "Bearer A"}).json()


@pytest.fixture
def slow_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records turns five seconds after they were asked for, by its own clock."""
    monkeypatch.setattr(sessions, "time", SimpleNamespace(time=lambda: time.time() + 5))


@pytest.mark.usefixtures("slow_ledger")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "body"),
    [
        ("hello world", {}),
        (f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}", {"tools": TOOLS, "instructions": "be kind"}),
        (f"First {CALL}{CALL} then {CALL} and done.", {"tools": TOOLS, "parallel_tool_calls": True}),
        (f"{CALL}\n{CALL}", {"tools": TOOLS, "parallel_tool_calls": False, "prompt_cache_key": "k"}),
        ("hello world", {"tools": TOOLS, "tool_choice": "none", "metadata": {"a": "b"}, "instructions": ""}),
        ("<think>\nlong thoughts", {"max_output_tokens": 12, "include": ["reasoning.encrypted_content"]}),
        ("hello", {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "temperature": 0.5}),
    ],
)
def test_a_response_is_read_as_it_was_given(bench: Recording, says: str, body: dict[str, Any], stream: bool) -> None:
    bench.says = says
    response = given(bench, {**body, "stream": stream})
    assert read_again(bench, response["id"]) == response
    more = given(bench, {**body, "input": "more", "previous_response_id": response["id"], "stream": stream})
    assert more["previous_response_id"] == response["id"]
    assert read_again(bench, more["id"]) == more


def test_cached_tokens_are_read_as_they_were_given(bench: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = bench.sampler.sample

    def sample_cached(request: SampleRequest) -> ScriptedStream:
        stream = sample(request)
        stream.cached_tokens = 3
        return stream

    monkeypatch.setattr(bench.sampler, "sample", sample_cached)
    response = given(bench, {})
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert read_again(bench, response["id"]) == response


def test_an_answer_that_was_cut_off_says_so(bench: Recording) -> None:
    given = client(bench).responses.create(model=MODEL, input="hello", max_output_tokens=3)
    stored = client(bench).responses.retrieve(given.id)
    assert (stored.status, stored.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_an_answer_of_another_wire_is_read_too(bench: Recording) -> None:
    answer = client(bench).chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert client(bench).responses.retrieve(answer.id).output_text == "hello world"


def test_only_its_owner_reads_and_deletes_a_response(bench: Recording) -> None:
    given = client(bench).responses.create(model=MODEL, input="hello")
    for act in (client(bench, "B").responses.retrieve, client(bench, "B").responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(given.id)
    assert httpx.get(f"{bench.url}/v1/responses/{given.id}").status_code == 401
    assert httpx.delete(f"{bench.url}/v1/responses/{given.id}").status_code == 401
    assert len(bench.turns()) == 1


def test_a_deleted_response_is_gone(bench: Recording) -> None:
    given = client(bench).responses.create(model=MODEL, input="a secret")
    client(bench).responses.delete(given.id)
    with pytest.raises(openai.NotFoundError):
        client(bench).responses.retrieve(given.id)
    for table in ("turns", "messages", "sessions"):
        assert bench.db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] == 0
    with pytest.raises(openai.NotFoundError):
        client(bench).responses.delete(given.id)


def test_what_later_turns_contain_is_deleted_after_them(bench: Recording) -> None:
    first = client(bench).responses.create(model=MODEL, input="hello")
    second = client(bench).responses.create(model=MODEL, input="more", previous_response_id=first.id)
    with pytest.raises(openai.ConflictError, match="Later turns"):
        client(bench).responses.delete(first.id)
    client(bench).responses.delete(second.id)
    (turn,) = bench.turns()
    assert (turn.completion, turn.next_state) == (first.id, None)
    client(bench).responses.delete(first.id)
    assert bench.turns() == []


@pytest.mark.parametrize("trained", [False, True])
def test_the_words_of_a_deleted_request_are_gone_from_the_turn_before(bench: Recording, trained: bool) -> None:
    first = client(bench).responses.create(model=MODEL, input="hello")
    words = "Too secret: shorter, please."
    second = client(bench).responses.create(model=MODEL, input=words, previous_response_id=first.id)
    (before, _after) = bench.turns()
    verdict = Verdict(-1.0, Source.LLM, (Hint(words),), (Vote(Question.SCORE, -1.0, text=words),), words)
    heard = HeardWishes(replied=(Wish(words, "length", lasting=True),))
    arguments = (before.number, verdict, SampleKind.OPD_RL, "", 0, None, heard)
    assert bench.ledger.submit(verdicts.record, *arguments).result()
    if trained:
        bench.ledger.submit(lambda db: db.execute("UPDATE turns SET state = ?", (State.APPLIED,))).result()
    assert "secret" in everything(bench)
    client(bench).responses.delete(second.id)
    assert "secret" not in everything(bench)
    (turn,) = bench.turns()
    assert (turn.state, turn.next_state) == (State.APPLIED if trained else State.DROPPED, None)
    assert turn.reason == ("" if trained else "what came next was deleted")
    assert (turn.verdict is not None) is trained


def test_explicit_feedback_on_the_turn_before_a_deleted_one_still_counts(bench: Recording) -> None:
    first = client(bench).responses.create(model=MODEL, input="hello")
    second = client(bench).responses.create(model=MODEL, input="no", previous_response_id=first.id)
    rating = Feedback(1.0, "nice", Source.EXPLICIT)
    bench.ledger.submit(turns.add_feedback, "alice", first.id, 0, rating).result()
    (before, _after) = bench.turns()
    assert bench.ledger.submit(verdicts.record, before.number, Verdict(1.0), SampleKind.RL, "", 1).result()
    client(bench).responses.delete(second.id)
    (turn,) = bench.turns()
    assert (turn.state, turn.verdict, turn.feedback) == (State.READY, None, [rating])


def everything(bench: Recording) -> str:
    """All words in the ledger."""
    tables = [row[0] for row in bench.db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    return str([tuple(row) for table in tables for row in bench.db.execute(f"SELECT * FROM {table}")])


def test_a_turn_that_shares_tokens_with_a_deleted_one_keeps_them(bench: Recording) -> None:
    first = client(bench).responses.create(model=MODEL, input="hello")
    one = client(bench).responses.create(model=MODEL, input="left", previous_response_id=first.id)
    other = client(bench).responses.create(model=MODEL, input="left again", previous_response_id=first.id)
    before = {turn.completion: turn.prompt_ids for turn in bench.turns()}
    client(bench).responses.delete(one.id)
    after = {turn.completion: (turn.prompt_ids, [m["content"] for m in turn.messages]) for turn in bench.turns()}
    assert after[other.id] == (before[other.id], ["hello", "hello world", "left again"])
    (number,) = turns.turns_of(bench.db, "alice", other.id)
    kept, _length = packing.sequence(bench.db, number)
    assert kept[: len(before[other.id])] == before[other.id]


def test_a_turn_in_training_and_a_turn_of_an_episode_stay(bench: Recording) -> None:
    given = client(bench).responses.create(model=MODEL, input="hello")
    bench.ledger.submit(lambda db: db.execute("UPDATE turns SET state = ?", (State.BATCHED,))).result()
    with pytest.raises(openai.ConflictError, match="being trained on"):
        client(bench).responses.delete(given.id)
    headers = {"X-Episode": "1", "X-Session-Id": "episode"}
    in_episode = client(bench).responses.create(model=MODEL, input="hello", extra_headers=headers)
    with pytest.raises(openai.ConflictError, match="episode"):
        client(bench).responses.delete(in_episode.id)


def test_a_damaged_response_is_refused_in_a_sentence_and_its_conversation_goes_on(bench: Recording) -> None:
    first = given(bench, {"input": "hello"})
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello world"}]
    bench.ledger.submit(lambda db: db.execute("UPDATE messages SET body = substr(body, 2)")).result()
    answer = httpx.get(f"{bench.url}/v1/responses/{first['id']}", headers={"Authorization": "Bearer A"})
    assert answer.status_code == 410
    assert "is damaged" in answer.json()["error"]["message"]
    third = bench.send("responses", {"input": "x", "previous_response_id": first["id"]}, Authorization="Bearer A")
    assert (third.status_code, "damaged" in third.text) == (400, True)
    second = given(bench, {"input": [*said, {"role": "user", "content": "and now?"}]})
    assert read_again(bench, second["id"])["output"] == second["output"]
    assert read_again(bench, first["id"])["output"] == first["output"], "the client has sent the words again"
    gone = httpx.delete(f"{bench.url}/v1/responses/{second['id']}", headers={"Authorization": "Bearer A"})
    assert gone.status_code == 200

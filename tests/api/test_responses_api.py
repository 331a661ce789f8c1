"""`/v1/responses`: OpenAI's client against a scripted model."""

import json
import sqlite3
import threading
from pathlib import Path

import openai
import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.api.wires import responses
from openclaw_rl.ledger.errors import CaptureSuspended
from openclaw_rl.types import StoredTurn
from support.harness import MODEL, Bench, openai_error, running
from support.recording import Recording

TOOLS = [
    {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>'


@pytest.fixture
def bench(recording: Recording) -> Recording:
    return recording


def test_a_whole_answer(bench: Recording) -> None:
    answer = bench.client.responses.create(model=MODEL, input="hello", instructions="be kind", metadata={"a": "b"})
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.output_text, answer.error) == ("completed", "hello world", None)
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.metadata, answer.store) == ("be kind", {"a": "b"}, True)
    (request,) = bench.sampler.requests
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert answer.usage.output_tokens == len(bench.script(request, 0))
    assert "<|im_start|>system\nbe kind<|im_end|>" in bench.shown()
    assert bench.turns()[0].completion == answer.id


def test_a_stream_is_the_same_answer_in_pieces(bench: Recording) -> None:
    bench.says = f"<think>\nhm\n</think>\n\nI look. 狐狸\n{CALL}\n{CALL}"
    whole = bench.client.responses.create(model=MODEL, input="hello", tools=TOOLS)
    with bench.client.responses.stream(model=MODEL, input="hello", tools=TOOLS) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert plain(streamed) == plain(whole)
    assert streamed.usage == whole.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    thoughts = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert thoughts == whole.output[0].content[0].text == "hm"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in streamed.output]


def test_input_tokens_are_counted_and_nothing_is_sampled_or_recorded(bench: Recording) -> None:
    first = bench.client.responses.create(model=MODEL, input="hello", tools=TOOLS)
    ask = {"model": MODEL, "input": "and then?", "previous_response_id": first.id, "tools": TOOLS}
    counted = bench.client.responses.input_tokens.count(**ask)
    assert counted.object == "response.input_tokens"
    assert (len(bench.sampler.requests), len(bench.turns())) == (1, 1)
    assert counted.input_tokens == bench.client.responses.create(**ask).usage.input_tokens
    assert bench.send("responses/input_tokens", {"model": "other", "input": "a"}).status_code == 404
    assert bench.send("responses/input_tokens", {"input": 7}).status_code == 400


def plain(response: openai.types.responses.Response) -> list:
    """The items without their ids, which differ from answer to answer."""
    return [
        item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) | {"content": parts(item)}
        for item in response.output
    ]


def parts(item: object) -> list:
    return [part.model_dump(exclude={"parsed"}) for part in getattr(item, "content", None) or []]


def continues(turn: StoredTurn, earlier: StoredTurn) -> bool:
    """Whether a turn is of the same session and begins with the tokens of an earlier one, which the model spelt."""
    tokens = [*earlier.prompt_ids, *earlier.response_ids]
    return turn.session == earlier.session and turn.prompt_ids[: len(tokens)] == tokens


def test_a_tool_conversation_is_sent_back_as_items(bench: Recording) -> None:
    bench.says = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    given: list = [{"role": "user", "content": "where?"}]
    first = bench.client.responses.create(model=MODEL, input=given, tools=TOOLS, instructions="be kind")
    call = first.output[-1]
    assert (call.name, json.loads(call.arguments)) == ("look", {"at": "the fox"})
    given += [item.model_dump(exclude_none=True) for item in first.output]
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "a fox"})
    bench.says = "It is there."
    second = bench.client.responses.create(model=MODEL, input=given, tools=TOOLS, instructions="be kind")
    assert second.output_text == "It is there."
    one, other = bench.turns()
    assert continues(other, one)
    assert one.next_state == [{"role": "tool", "tool_call_id": call.call_id, "content": "a fox"}]


@pytest.mark.parametrize("stream", [True, False])
def test_a_previous_response_is_continued_from_the_ledger(bench: Recording, stream: bool) -> None:
    bench.says = f"I look.\n{CALL}"
    first = bench.client.responses.create(model=MODEL, input="where?", tools=TOOLS, instructions="be kind")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "a fox"}
    asked = {"model": MODEL, "previous_response_id": first.id, "tools": TOOLS, "instructions": "be kind"}
    bench.says = "It is there."
    if stream:
        with bench.client.responses.stream(**asked, input=[output]) as events:
            second = events.get_final_response()
    else:
        second = bench.client.responses.create(**asked, input=[output])
    assert second.previous_response_id == first.id
    one, other = bench.turns()
    assert continues(other, one)
    third = bench.client.responses.create(model=MODEL, previous_response_id=second.id, input="thanks")
    assert "be kind" not in bench.shown(), "instructions hold for one request"
    assert "It is there." in bench.shown()
    assert third.id in {turn.completion for turn in bench.turns()}
    assert bench.turns()[1].next_state == [{"role": "user", "content": "thanks"}]


def test_the_system_prompt_of_another_wire_stays_in_the_conversation(bench: Recording) -> None:
    system = [{"role": "system", "content": "be brave"}, {"role": "user", "content": "hello"}]
    chat = bench.client.chat.completions.create(model=MODEL, messages=system)  # type: ignore[arg-type]
    first = bench.client.responses.create(model=MODEL, previous_response_id=chat.id, input="go on")
    bench.client.responses.create(model=MODEL, previous_response_id=first.id, input="and on")
    assert "be brave" in bench.shown()


def test_a_ledger_that_cannot_be_read_now_is_503(bench: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*_: object) -> None:
        raise CaptureSuspended("database is locked")

    monkeypatch.setattr(responses, "conversation", locked)
    refused = bench.send("responses", {"input": "more", "previous_response_id": "resp_1"})
    assert (refused.status_code, openai_error(refused)["code"]) == (503, None)


def test_a_short_request_for_a_long_conversation_is_read_in_a_thread(
    bench: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    real = responses.conversation

    def conversation(db: sqlite3.Connection, owner: str, id: str) -> list[dict]:
        threads.append(threading.current_thread().name)
        return real(db, owner, id)

    monkeypatch.setattr(responses, "conversation", conversation)
    first = bench.client.responses.create(model=MODEL, input="hello")
    bench.client.responses.create(model=MODEL, previous_response_id=first.id, input="more")
    assert [name.partition("_")[0] for name in threads] == ["read"]


def test_what_is_not_stored_cannot_be_continued(bench: Recording) -> None:
    first = bench.client.responses.create(model=MODEL, input="hello", store=False)
    assert (first.store, bench.turns()) == (False, [])
    for id in (first.id, "resp_none"):
        with pytest.raises(openai.BadRequestError) as refused:
            bench.client.responses.create(model=MODEL, previous_response_id=id, input="more")
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_client_that_never_stores_is_recorded_if_its_owner_says_so(bench: Recording) -> None:
    answer = bench.client.responses.create(
        model=MODEL, input="hello", store=False, prompt_cache_key="thread-1", extra_headers={"X-Store": "1"}
    )
    (turn,) = bench.turns()
    assert (turn.completion, turn.session.id, answer.store) == (answer.id, "thread-1", True)


def test_another_owners_response_is_not_found(tiny_model: Path, tmp_path: Path) -> None:
    keys = [ApiKey("alice", "s3cret-a"), ApiKey("bob", "s3cret-b")]
    with running(Recording(tiny_model, tmp_path / "run", keys=keys)) as bench:
        alice = openai.OpenAI(base_url=f"{bench.url}/v1", api_key="s3cret-a", max_retries=0)
        first = alice.responses.create(model=MODEL, input="my secret")
        for client, status in ((alice, 200), (alice.with_options(api_key="s3cret-b"), 400)):
            with_id = {"model": MODEL, "previous_response_id": first.id, "input": "more"}
            response = bench.send("responses", with_id, Authorization=f"Bearer {client.api_key}")
            assert response.status_code == status
        assert bench.send("responses", {"input": "hello"}).status_code == 401
        bench.ledger.close()  # type: ignore[attr-defined]


def test_without_capture_nothing_is_stored(tiny_model: Path) -> None:
    with running(Bench(tiny_model)) as bench:
        answer = bench.client.responses.create(model=MODEL, input="hello")
        assert answer.store is False  # type: ignore[attr-defined]
        refused = bench.send("responses", {"input": "more", "previous_response_id": answer.id})
        assert "--no-capture" in openai_error(refused)["message"]


def test_a_cut_answer_is_incomplete(bench: Recording) -> None:
    whole = bench.client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with bench.client.responses.stream(model=MODEL, input="hello", max_output_tokens=2) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    assert plain(events[-1].response) == plain(whole)
    assert whole.output[0].status == "incomplete"


def test_reasoning_can_be_kept_as_encrypted_content(bench: Recording) -> None:
    bench.says = "hm\n</think>\n\nhello"
    asked = {"model": MODEL, "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "high"}}
    answer = bench.client.responses.create(**asked, input="hello")
    thought = answer.output[0]
    kept = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    given = [{"role": "user", "content": "hello"}, kept, {"role": "assistant", "content": "hello"}]
    bench.client.responses.create(**asked, input=[*given, {"role": "user", "content": "more"}])
    assert bench.turns()[1].messages[1]["reasoning_content"] == "hm"


def test_parts_and_roles(bench: Recording) -> None:
    given = [
        {"role": "system", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    bench.client.responses.create(model=MODEL, input=given)
    assert [(m["role"], m["content"]) for m in bench.turns()[0].messages] == [
        ("developer", "be brief"),
        ("user", "a\nb"),
    ]


REFUSALS = [
    (b"not json", 400, None, "not valid JSON"),
    ({}, 400, "input", "Field required"),
    ({"input": []}, 400, "input", "input must not be empty"),
    (
        {"input": [{"role": "king", "content": "x"}]},
        400,
        "input.0.message.role",
        "it must be 'user', 'assistant', 'system' or 'developer'",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        400,
        "input.0.content",
        "this model cannot see images",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        400,
        "input.0.message.content.0",
        "'input_file'",
    ),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input.0", "'item_reference' is not supported"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, 400, "tools.0", "'web_search' are not supported"),
    ({"input": "x", "tools": [{"type": "function"}]}, 400, "tools.0", "needs a name"),
    ({"input": "x", "tool_choice": {"type": "file_search"}}, 400, "tool_choice", "name a function"),
    ({"input": "x", "background": True}, 400, "background", "background is not supported"),
    ({"input": "x", "conversation": "conv_1"}, 400, "conversation", "use previous_response_id"),
    ({"input": "x", "prompt": {"id": "p"}}, 400, "prompt", "send instructions"),
    ({"input": "x", "top_logprobs": 3}, 400, "top_logprobs", "chat/completions"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, 400, "include", "chat/completions"),
    ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens", "at least 1"),
    ({"input": "x", "model": "gpt-99"}, 404, "model", "does not exist"),
    ({"input": "hello " * 5000}, 400, "input", "tokens"),
]


def test_an_item_is_refused_by_its_place_also_if_those_before_it_are_known(bench: Recording) -> None:
    known = [{"type": "message", "role": "user", "content": f"word {number}"} for number in range(3)]
    for items in (known[:2], known):
        assert bench.send("responses", {"input": items}).status_code == 200
    assert [message["content"] for message in bench.turns()[-1].messages] == ["word 0", "word 1", "word 2"]
    wrong = {"type": "message", "role": "user", "content": 5}
    refused = openai_error(bench.send("responses", {"input": [known[0], wrong, *known]}))
    assert refused["param"].startswith("input.1.message.content")


@pytest.mark.parametrize(("body", "status", "param", "words"), REFUSALS)
def test_refusals_name_status_and_field(
    bench: Recording, body: object, status: int, param: str | None, words: str
) -> None:
    response = bench.send("responses", body)
    refused = openai_error(response)
    assert (response.status_code, refused["param"]) == (status, param), refused
    assert words in refused["message"]
    assert not bench.sampler.requests


def test_a_dying_engine_is_503_or_a_failed_response(bench: Recording) -> None:
    bench.sampler.dies_after = 2
    assert openai_error(bench.send("responses", {"input": "hello"}))["type"] == "server_error"
    last = list(bench.client.responses.create(model=MODEL, input="hello", stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "worker died" in last.response.error.message

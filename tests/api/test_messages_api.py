"""`/v1/messages`: Anthropic's client against a scripted model."""

import json
from pathlib import Path

import anthropic
import httpx
import pytest

from openclaw_rl.api.options import ApiKey
from support.harness import MODEL, Bench, running

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>'
ASK = {"model": MODEL, "max_tokens": 400, "messages": HELLO}


def error(response: httpx.Response) -> dict:
    """Every error has Anthropic's shape."""
    body = response.json()
    assert (set(body), body["type"]) == ({"type", "error"}, "error")
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def test_a_whole_answer(bench: Bench) -> None:
    answer = bench.anthropic.messages.create(**ASK)
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in answer.content] == [("text", "hello world")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    (request,) = bench.sampler.requests
    assert answer.usage.input_tokens == len(request.prompt_ids)
    assert answer.usage.output_tokens == len(bench.script(request, 0))


def test_a_stream_is_the_same_answer_in_pieces(bench: Bench) -> None:
    bench.says = f"<think>\nhm\n</think>\n\nI look. 狐狸\n{CALL}\n{CALL}"
    whole = bench.anthropic.messages.create(**ASK, tools=TOOLS)
    with bench.anthropic.messages.stream(**ASK, tools=TOOLS) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (events[0], events[-1]) == ("message_start", "message_stop")
    assert plain(streamed) == plain(whole)
    assert streamed.usage == whole.usage


def plain(message: anthropic.types.Message) -> tuple:
    """A message without what differs from answer to answer: ids and signatures."""
    blocks = [block.model_dump(exclude={"id", "signature"}, exclude_none=True) for block in message.content]
    return blocks, message.stop_reason, message.stop_sequence


def test_a_tool_conversation(bench: Bench) -> None:
    bench.says = f"I look.\n{CALL}"
    system = [{"type": "text", "text": "be kind"}, {"type": "text", "text": "be brief"}]
    first = bench.anthropic.messages.create(**ASK, system=system, tools=TOOLS, tool_choice={"type": "auto"})
    text, call = first.content
    assert (first.stop_reason, call.name, call.input) == ("tool_use", "look", {"at": "the fox"})
    assert text.text.strip() == "I look."
    assert "be kind\n\nbe brief" in bench.shown()
    assert '"description": "Looks."' in bench.shown()
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a fox"}]}
    failed = {"type": "tool_result", "tool_use_id": call.id, "content": "no such file", "is_error": True}
    after = {"role": "user", "content": [result, failed, {"type": "text", "text": "and?"}]}
    bench.says = "It is there."
    messages = [*HELLO, first.to_param(), after]
    bench.anthropic.messages.create(**{**ASK, "messages": messages}, system=system, tools=TOOLS)
    assert '{"name": "look", "arguments": {"at": "the fox"}}' in bench.shown()
    assert (
        "<|im_start|>tool\na fox<|im_end|>\n<|im_start|>tool\nError: no such file<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>" in bench.shown()
    )


def test_why_an_answer_ended(bench: Bench) -> None:
    bench.says = "one two three four"
    stopped = bench.anthropic.messages.create(**ASK, stop_sequences=["six", "three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "three")
    assert stopped.content[0].text == "one two "
    cut = bench.anthropic.messages.create(**{**ASK, "max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


def test_thinking_is_a_block_that_the_client_can_switch_and_send_back(bench: Bench) -> None:
    bench.says = "hm\n</think>\n\nhello"
    answer = bench.anthropic.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text = answer.content
    assert (thought.type, thought.thinking, text.text) == ("thinking", "hm", "hello")
    assert thought.signature
    bench.anthropic.messages.create(
        **{**ASK, "messages": [*HELLO, answer.to_param(), *HELLO]}, thinking={"type": "disabled"}
    )
    assert not bench.shown().endswith("<think>\n")


def test_tokens_are_counted_and_nothing_is_sampled(bench: Bench) -> None:
    counted = bench.anthropic.messages.count_tokens(model=MODEL, messages=HELLO, system="be kind", tools=TOOLS)
    assert not bench.sampler.requests
    answer = bench.anthropic.messages.create(**ASK, system="be kind", tools=TOOLS)
    assert counted.input_tokens == answer.usage.input_tokens
    assert bench.send("messages/count_tokens", {"messages": []}).status_code == 400
    refused = bench.send("messages/count_tokens", {"messages": HELLO, "stop_sequences": list("abcde")})
    assert refused.json()["error"]["message"] == "stop_sequences takes at most 4 strings."


def test_sampling_parameters_arrive(bench: Bench) -> None:
    bench.anthropic.messages.create(**ASK, extra_body={"temperature": 0.5, "top_p": 0.25, "top_k": 3})
    params = bench.sampler.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.25, 3, 400)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSALS = [
    (b"not json", 400, "not valid JSON"),
    (b"[]", 400, "must be a JSON object"),
    ({}, 400, "messages: Field required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "this model cannot see images"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, "'document' is not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
        400,
        "this model cannot see images",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        400,
        "cannot contain tool_use",
    ),
    ({"messages": [*HELLO, {"role": "assistant", "content": "The answer is"}]}, 400, "last message must be the user's"),
    (
        {"messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        400,
        "'web_search_20250305'",
    ),
    ({"messages": HELLO, "tools": [{"name": "look"}]}, 400, "needs an input_schema"),
    ({"messages": HELLO, "tool_choice": {"type": "tool"}}, 400, "needs a name"),
    ({"messages": HELLO, "mcp_servers": [{"url": "x"}]}, 400, "mcp_servers is not supported"),
    ({"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
    ({"messages": HELLO, "stop_sequences": list("abcde")}, 400, "stop_sequences takes at most 4 strings"),
    ({"messages": HELLO, "model": "claude-99"}, 404, "does not exist"),
    ({"messages": [{"role": "user", "content": "hello " * 5000}]}, 400, "prompt is too long: "),
]


@pytest.mark.parametrize(("body", "status", "words"), REFUSALS)
def test_refusals_are_one_sentence_in_anthropics_shape(bench: Bench, body: object, status: int, words: str) -> None:
    response = bench.send("messages", body)
    refused = error(response)
    assert (response.status_code, words in refused["message"]) == (status, True), refused
    assert refused["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert not bench.sampler.requests


def test_batches_and_wrong_paths_are_refused_in_anthropics_shape(bench: Bench) -> None:
    assert error(bench.send("messages/batches", {}))["type"] == "not_found_error"
    assert "only POST" in error(httpx.get(f"{bench.url}/v1/messages"))["message"]
    with pytest.raises(anthropic.NotFoundError):
        bench.anthropic.messages.batches.list()
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        bench.anthropic.models.retrieve("claude-99")


def test_engine_failures_have_anthropics_types(bench: Bench) -> None:
    bench.sampler.full = True
    response = bench.send("messages", ASK)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert error(response)["type"] == "rate_limit_error"
    bench.sampler.full, bench.sampler.dies_after = False, 2
    assert error(bench.send("messages", ASK))["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIError, match="worker died"), bench.anthropic.messages.stream(**ASK) as stream:
        stream.get_final_message()


def test_keys_are_sent_as_anthropics_clients_send_them(tiny_model: Path) -> None:
    with running(Bench(tiny_model, keys=[ApiKey("alice", "s3cret-a"), ApiKey("bob", "s3cret-b")])) as bench:
        client = anthropic.Anthropic(base_url=bench.url, api_key="s3cret-a", max_retries=0)
        client.messages.create(**ASK)
        client.messages.count_tokens(model=MODEL, messages=HELLO)
        anthropic.Anthropic(base_url=bench.url, auth_token="s3cret-b", max_retries=0).messages.create(**ASK)
        assert [request.owner for request in bench.sampler.requests] == ["alice", "bob"]
        for path in ("messages", "messages/count_tokens"):
            refused = bench.send(path, ASK)
            assert (refused.status_code, error(refused)["type"]) == (401, "authentication_error")
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="s3cret-c").messages.create(**ASK)


def test_the_models_are_listed_for_anthropics_clients(bench: Bench) -> None:
    (model,) = bench.anthropic.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert bench.anthropic.models.retrieve("owner/tiny").created_at == model.created_at


def test_the_request_is_in_the_openapi_description(bench: Bench) -> None:
    described = httpx.get(f"{bench.url}/openapi.json").json()["paths"]["/v1/messages"]["post"]["requestBody"]
    assert "messages" in described["content"]["application/json"]["schema"]["properties"]
    assert "$ref" not in json.dumps(described)


def test_arguments_with_half_a_surrogate_pair_are_answered(bench: Bench) -> None:
    bench.says = '<tool_call>\n{"name": "look", "arguments": {"at": "\\ud83d"}}\n</tool_call>'
    ask = {**ASK, "tools": TOOLS}
    answer = bench.send("messages", ask)
    assert answer.status_code == 200
    assert answer.json()["content"][-1]["input"] == {"at": "\ud83d"}

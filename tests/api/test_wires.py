"""All wires together: one conversation over several of them, and streams cut in any way."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.api.auth import ANYONE
from openclaw_rl.api.reader import RawRequest
from openclaw_rl.api.wires.base import Wire
from openclaw_rl.api.wires.chat import ChatWire
from openclaw_rl.api.wires.completions import CompletionsWire
from openclaw_rl.api.wires.messages import MessagesWire
from openclaw_rl.api.wires.responses import ResponsesWire
from openclaw_rl.types import SampledToken, SampleRequest, State
from support.fakes import ScriptedStream
from support.harness import MODEL, Bench
from support.properties import examples
from support.recording import Recording

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks."}
CHAT_TOOLS = [{"type": "function", "function": {**FUNCTION, "parameters": PARAMETERS}}]
MESSAGES_TOOLS = [{**FUNCTION, "input_schema": PARAMETERS}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION, "parameters": PARAMETERS}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the fox"}}\n</tool_call>'


def answered(bench: Recording, path: str, says: str, body: dict[str, Any]) -> dict[str, Any]:
    bench.says = says
    response = bench.send(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_conversation_continues_from_wire_to_wire(recording: Recording) -> None:
    """Chat, messages, responses: one session, one growing sequence, and each turn has what came next."""
    says = f"I look. {CALL}"
    chat = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "where is the fox?"}]
    message = answered(recording, "chat/completions", says, {"messages": chat, "tools": CHAT_TOOLS})["choices"][0][
        "message"
    ]
    call = message["tool_calls"][0]
    blocks = [
        {"role": "user", "content": "where is the fox?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": message["content"]},
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": "look",
                    "input": json.loads(call["function"]["arguments"]),
                },
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "a fox"}]},
    ]
    second = answered(
        recording, "messages", "It is here.", {"system": "be kind", "messages": blocks, "tools": MESSAGES_TOOLS}
    )
    items = [
        {"role": "user", "content": "where is the fox?"},
        {"role": "assistant", "content": message["content"]},
        {"type": "function_call", "call_id": call["id"], "name": "look", "arguments": '{"at":"the fox"}'},
        {"type": "function_call_output", "call_id": call["id"], "output": "a fox"},
        {"role": "assistant", "content": second["content"][0]["text"]},
        {"role": "user", "content": "thanks"},
    ]
    third = answered(
        recording, "responses", "Bye.", {"instructions": "be kind", "input": items, "tools": RESPONSES_TOOLS}
    )
    fourth = answered(
        recording,
        "responses",
        "Yes?",
        {
            "previous_response_id": third["id"],
            "instructions": "be kind",
            "input": "one more",
            "tools": RESPONSES_TOOLS,
        },
    )
    recording.send("feedback", {"id": second["id"], "thumb": "up"}).raise_for_status()
    turns = recording.turns()
    assert len({turn.session for turn in turns}) == 1
    for earlier, later in itertools.pairwise(turns):
        tokens = [*earlier.prompt_ids, *earlier.response_ids]
        assert later.prompt_ids[: len(tokens)] == tokens
    assert [turn.next_state[0]["content"] for turn in turns[:-1]] == ["a fox", "thanks", "one more"]
    assert [turn.state for turn in turns] == [State.READY] * 3 + [State.AWAITING]
    assert [turn.completion for turn in turns[1:]] == [second["id"], third["id"], fourth["id"]]
    assert [turn.feedback[0].score for turn in turns if turn.feedback] == [1.0]


def test_claude_codes_session_is_recognised(recording: Recording) -> None:
    ask = {"messages": [{"role": "user", "content": "hello"}]}
    recording.send("messages", ask, **{"X-Claude-Code-Session-Id": "by-header"})
    recording.send("messages", ask | {"metadata": {"user_id": '{"device_id": "d", "session_id": "as-json"}'}})
    recording.send("messages", ask | {"metadata": {"user_id": "user_ab_account__session_as-text"}})
    assert [turn.session.id for turn in recording.turns()] == ["by-header", "as-json", "as-text"]


class CutStream(ScriptedStream):
    """Samples the script in pieces of given sizes."""

    sizes: list[int]

    async def __aiter__(self) -> AsyncIterator[list[SampledToken]]:
        tokens = [token async for batch in super().__aiter__() for token in batch]
        sizes = iter(self.sizes)
        while tokens:
            size = next(sizes, len(tokens))
            yield tokens[:size]
            tokens = tokens[size:]


class CutBench(Bench):
    """A service, without a server, whose sampler yields tokens in pieces of `sizes`."""

    sizes: list[int]

    def sample(self, request: SampleRequest) -> CutStream:
        stream = CutStream(self.sampler, request, 0)
        stream.sizes = self.sizes
        return stream

    async def answer(self, wire: Wire, body: dict[str, Any], sizes: list[int]) -> bytes:
        self.sizes = sizes
        self.sampler.sample = self.sample  # type: ignore[method-assign]
        raw = RawRequest(json.dumps(body).encode(), wire.parse, ANYONE, {})
        incoming, completion = await self.service.begin(raw, lambda: wire.id_prefix)
        await completion.ready()
        if not incoming.request.stream:
            return await wire.whole(completion)
        return b"".join([piece async for piece in wire.events(completion)])


@pytest.fixture(scope="module")
def cut_bench(tiny_model: Path) -> CutBench:
    return CutBench(tiny_model)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in stream.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat_message(events: list[dict[str, Any]]) -> Any:
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for choice in [choice for event in events for choice in event["choices"]]:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            message["calls"].setdefault(call["index"], []).append(call["function"])
        message["finish"] = choice["finish_reason"]
    calls = ["".join(part.get("arguments", "") for part in parts) for parts in message["calls"].values()]
    return [message["content"], message["reasoning"], calls, message["finish"]]


def chat_whole(body: dict[str, Any]) -> Any:
    choice = body["choices"][0]
    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    return [message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]]


def blocks_message(events: list[dict[str, Any]]) -> Any:
    blocks: list[list[str]] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(blocks), False)
                blocks.append([event["content_block"]["type"], ""])
                is_open = True
            case "content_block_delta":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                delta = event["delta"]
                blocks[-1][1] += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
            case "content_block_stop":
                assert (event["index"], is_open) == (len(blocks) - 1, True)
                is_open = False
    assert not is_open
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    texts = [[kind, json.loads(text) if kind == "tool_use" else text] for kind, text in blocks]
    return [texts, events[-2]["delta"], events[-2]["usage"]]


def blocks_whole(body: dict[str, Any]) -> Any:
    contents = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    texts = [[block["type"], block[contents[block["type"]]]] for block in body["content"]]
    return [texts, {name: body[name] for name in ("stop_reason", "stop_sequence")}, body["usage"]]


def items_message(events: list[dict[str, Any]]) -> Any:
    texts: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        if event["type"].endswith(".delta"):
            assert event["output_index"] == len(done)
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        elif event["type"] == "response.output_item.done":
            done[event["output_index"]] = event["item"]
    response = events[-1]["response"]
    assert list(done.values()) == response["output"]
    assert [item_text(item) for item in done.values()] == list(texts.values())
    return items_whole(response)


def items_whole(body: dict[str, Any]) -> Any:
    items = [[item["type"], item_text(item), item["status"]] for item in body["output"]]
    return [items, body["status"], body["incomplete_details"], body["usage"]]


def item_text(item: dict[str, Any]) -> str:
    return item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


def text_message(events: list[dict[str, Any]]) -> Any:
    choices = [choice for event in events for choice in event["choices"]]
    return ["".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]]


def text_whole(body: dict[str, Any]) -> Any:
    return [body["choices"][0]["text"], body["choices"][0]["finish_reason"]]


HELLO = [{"role": "user", "content": "hello"}]
WIRES = {
    "chat": (
        lambda bench: ChatWire(MODEL, bench.renderer.tokenizer.backend),
        {"messages": HELLO, "tools": CHAT_TOOLS},
        chat_message,
        chat_whole,
    ),
    "messages": (
        lambda _: MessagesWire(MODEL),
        {"messages": HELLO, "tools": MESSAGES_TOOLS},
        blocks_message,
        blocks_whole,
    ),
    "responses": (
        lambda _: ResponsesWire(MODEL, ANYONE, None),
        {"input": "hello", "tools": RESPONSES_TOOLS},
        items_message,
        items_whole,
    ),
    "completions": (
        lambda bench: CompletionsWire(MODEL, bench.renderer.tokenizer.backend),
        {"prompt": "hello"},
        text_message,
        text_whole,
    ),
}
#: With characters that end a line for some clients, and for `events_of`.
LINE_ENDS = ("\n", "\r", "\x85", "\u2028", "\u2029", "\x0b", "\x1e")
PIECES = st.sampled_from(
    [CALL, "<think>", "</think>", *LINE_ENDS, "hm", "the fox 狐狸", "<tool_call>", "{", '"x"', " "]
)


@pytest.mark.parametrize("name", WIRES)
@examples(60)
@given(
    says=st.lists(PIECES, max_size=6).map("".join),
    sizes=st.lists(st.integers(1, 9), max_size=30),
    limit=st.integers(1, 400),
)
def test_any_cutting_gives_the_same_message(
    cut_bench: CutBench, name: str, says: str, sizes: list[int], limit: int
) -> None:
    make, body, streamed, whole = WIRES[name]
    cut_bench.says = says
    body = {**body, "max_output_tokens" if name == "responses" else "max_tokens": limit}

    async def answers() -> tuple[Any, Any]:
        stream = await cut_bench.answer(make(cut_bench), {**body, "stream": True}, sizes)
        answer = await cut_bench.answer(make(cut_bench), body, [])
        return streamed(events_of(stream)), whole(json.loads(answer))

    in_pieces, at_once = asyncio.run(answers())
    assert in_pieces == at_once

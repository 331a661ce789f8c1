"""Talking to a model over real HTTP: what is sent, what comes back, and every way in which it can fail."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openclaw_rl.client import ServerError
from openclaw_rl.evals import eval_tasks, tool_use
from openclaw_rl.evals.chat import RETRIES, Chat, Reply, ToolCall, read_reply
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import load_turn, turn_numbers
from support.harness import Bench, running

HELLO = [{"role": "user", "content": "hello \ud83d"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def completion(content: Any = "hi", **message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return {"id": "chatcmpl-7", "object": "chat.completion", "choices": [choice]}


class Endpoint:
    """A server that answers what a test tells it to, and keeps what it was sent."""

    def __init__(self) -> None:
        self.app = Starlette(
            routes=[Route(f"/v1/{name}", self.answer, methods=["POST"]) for name in ("chat/completions", "responses")]
        )
        self.url = ""
        self.answers: list[Callable[[], Response]] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def answer(self, request: Request) -> Response:
        self.bodies.append(json.loads(await request.body()))
        self.headers.append(dict(request.headers))
        return self.answers.pop(0)() if self.answers else JSONResponse(completion())


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with running(Endpoint()) as endpoint:  # type: ignore[arg-type]
        yield endpoint  # type: ignore[misc]


@pytest.fixture
async def chat(endpoint: Endpoint) -> AsyncIterator[Chat]:
    async with Chat(endpoint.url, model="tiny", key="sesame\n") as chat:
        yield chat


async def test_only_what_is_wished_is_sent(endpoint: Endpoint, chat: Chat):
    reply = await chat.ask(HELLO)
    assert reply == Reply("hi", id="chatcmpl-7")
    assert endpoint.bodies == [{"model": "tiny", "messages": HELLO, "max_tokens": 512}]
    assert endpoint.headers[0]["authorization"] == "Bearer sesame"


async def test_every_wish_is_sent(endpoint: Endpoint, chat: Chat):
    await chat.ask(HELLO, tools=TOOLS, max_tokens=9, temperature=0.0, seed=0, session="Zoë 1", keep=False)
    wishes = {"tools": TOOLS, "max_tokens": 9, "temperature": 0.0, "seed": 0, "session_id": "Zoë 1", "store": False}
    assert endpoint.bodies == [{"model": "tiny", "messages": HELLO, **wishes}]


async def test_notes_can_be_switched_off(endpoint: Endpoint, chat: Chat) -> None:
    for notes in (True, False):
        await chat.ask(HELLO, notes=notes)
    assert [headers.get("x-notes") for headers in endpoint.headers] == [None, "off"]


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
async def test_the_address_may_have_its_ending_or_not(endpoint: Endpoint, ending: str):
    async with Chat(endpoint.url + ending) as chat:
        assert (await chat.ask(HELLO)).text == "hi"
    assert "authorization" not in endpoint.headers[0]
    assert "model" not in endpoint.bodies[0]


async def test_tool_calls_are_read_as_they_were_written(endpoint: Endpoint, chat: Chat):
    calls = [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"a":  1'}}]
    endpoint.answers = [lambda: JSONResponse(completion(None, tool_calls=calls))]
    reply = await chat.ask(HELLO, tools=TOOLS)
    assert reply.tool_calls == (ToolCall("look", '{"a":  1'),)
    assert reply.text == ""


async def test_the_tokens_are_those_that_the_server_tells(endpoint: Endpoint, chat: Chat) -> None:
    told = {"prompt_tokens": 7, "completion_tokens": 2}
    bodies = iter([completion() | {"usage": usage} for usage in (told, {}, None, "7")])
    endpoint.answers = [lambda: JSONResponse(next(bodies))] * 4
    assert [(await chat.ask(HELLO)).tokens for _ in range(4)] == [(7, 2), None, None, None]


async def test_the_same_conversation_is_held_on_the_wire_of_responses(endpoint: Endpoint) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    output = [
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "content": [{"type": "output_text", "text": "It is "}, {"type": "output_text", "text": "4."}],
        },
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"a": 1}'},
    ]
    body = {"id": "resp-1", "output": output, "usage": {"input_tokens": 7, "output_tokens": 2}}
    endpoint.answers = [lambda: JSONResponse(body), lambda: JSONResponse(completion())]
    said = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "four"},
    ]
    async with Chat(endpoint.url, wire="responses", fields={"user": "ada"}) as chat:
        reply = await chat.ask(said, tools=TOOLS, max_tokens=1, seed=3)
        with pytest.raises(ServerError, match="not a response"):
            await chat.ask(HELLO)
    assert reply == Reply("It is 4.", (ToolCall("look", '{"a": 1}'),), "resp-1", (7, 2))
    assert endpoint.bodies[0] == {
        "user": "ada",
        "input": [
            *HELLO,
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "four"},
        ],
        "max_output_tokens": 16,
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
    }


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_is_waited_for(endpoint: Endpoint, chat: Chat, status: int):
    busy = lambda: JSONResponse({"error": {"message": "full"}}, status, {"Retry-After": "0.2"})  # noqa: E731
    endpoint.answers = [busy, busy]
    started = time.monotonic()
    assert (await chat.ask(HELLO)).text == "hi"
    assert time.monotonic() - started >= 0.4
    assert len(endpoint.bodies) == 3


async def test_a_server_that_stays_busy_is_a_failure(endpoint: Endpoint):
    endpoint.answers = [lambda: JSONResponse({"error": {"message": "The queue is full."}}, 429)] * 9
    async with Chat(endpoint.url, retries=replace(RETRIES, first_pause=0.001)) as chat:
        with pytest.raises(ServerError, match=r"answers 429: The queue is full\."):
            await chat.ask(HELLO)
    assert len(endpoint.bodies) == RETRIES.attempts == 6


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (lambda: JSONResponse({"error": {"message": "Too long."}}, 400), r"answers 400: Too long\."),
        (lambda: JSONResponse({"error": "odd"}, 500), "answers 500"),
        (lambda: Response("<html>", 404), "answers 404: <html>"),
        (lambda: Response("", 302, {"Location": "/"}), "answers 302"),
        (lambda: Response("<html>"), "does not answer with JSON"),
        (lambda: Response("[" * 200_000), "does not answer with JSON"),
        (lambda: Response("[" * 200_000, 500), r"answers 500: \[\["),
        (lambda: JSONResponse([]), "not a chat completion"),
        (lambda: JSONResponse({"choices": []}), "not a chat completion"),
        (lambda: JSONResponse(completion(7)), "not a chat completion"),
        (lambda: JSONResponse(completion(tool_calls=[{"function": {"name": "f"}}])), "not a chat completion"),
        (lambda: JSONResponse(completion(tool_calls=[{"function": {"name": "f", "arguments": {}}}])), "not a chat"),
    ],
)
async def test_other_answers_are_failures_at_once(
    endpoint: Endpoint, chat: Chat, answer: Callable[[], Response], complaint: str
):
    endpoint.answers = [answer]
    with pytest.raises(ServerError, match=complaint) as failure:
        await chat.ask(HELLO)
    assert not failure.value.is_too_long
    assert len(endpoint.bodies) == 1


async def test_the_real_server_says_what_the_model_cannot_hold(tiny_model: Path):
    with running(Bench(tiny_model)) as bench:
        async with Chat(bench.url) as chat:
            with pytest.raises(ServerError, match="this model's limit is") as failure:
                await chat.ask([{"role": "user", "content": "a long story " * 5000}])
            assert failure.value.is_too_long


async def test_a_server_that_is_too_slow_is_a_failure(endpoint: Endpoint):
    async def slow(_: Request) -> Response:
        await asyncio.sleep(0.4)
        return JSONResponse(completion())

    endpoint.app.router.routes = [Route("/v1/chat/completions", slow, methods=["POST"])]
    async with Chat(endpoint.url, timeout=0.1) as chat:
        with pytest.raises(ServerError, match=r"did not answer within 0\.1 seconds"):
            await chat.ask(HELLO)


async def test_a_connection_that_breaks_off_is_a_failure():
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with Chat(f"http://{host}:{port}") as chat:
            with pytest.raises(ServerError, match="broke: "):
                await chat.ask(HELLO)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        *[(url, "start the server or check the address") for url in ("http://127.0.0.1:9", "http://nowhere.invalid")],
        *[(url, "is not the address of a server") for url in ("127.0.0.1:9", "http://[")],
    ],
)
async def test_nobody_there_is_said_as_such(address: str, complaint: str):
    async with Chat(address) as chat:
        with pytest.raises(ServerError, match=complaint):
            await chat.ask(HELLO)


async def test_a_key_that_is_none_is_not_shown():
    async with Chat("http://127.0.0.1:9", key="ses\name") as chat:
        with pytest.raises(ServerError) as failure:
            await chat.ask(HELLO)
    assert "ses" not in str(failure.value)


async def test_a_run_against_nobody_ends_at_once():
    async with Chat("http://127.0.0.1:9") as chat:
        with pytest.raises(ServerError, match="No server answers"):
            await eval_tasks.PLANS[tool_use.TASK](False).ask(chat, 0, lambda _: None)


@pytest.mark.parametrize("body", [None, 1, "x", {}, {"choices": [None]}, {"choices": [{"message": None}]}])
def test_nonsense_is_no_reply(body: Any):
    with pytest.raises(ServerError):
        read_reply(body)


async def test_the_real_server_records_what_is_kept_and_nothing_else(tiny_model: Path, tmp_path: Path):
    ledger = Ledger(tmp_path)
    with running(Bench(tiny_model, ledger)) as bench:
        async with Chat(bench.url) as chat:
            await chat.ask([{"role": "user", "content": "between us"}], session="mine", keep=False)
            await chat.ask([{"role": "user", "content": "for all"}], session="mine", max_tokens=3)
    db = connect(tmp_path / FILE, readonly=True)
    turns = [load_turn(db, number) for number in turn_numbers(db)]
    said = [message["content"] for turn in turns for message in turn.messages]
    assert ([turn.session.id for turn in turns], said) == (["mine"], ["for all"])
    db.close()
    ledger.close()


async def test_the_real_server_s_tool_calls_are_graded(tiny_model: Path):
    case = next(case for case in tool_use.cases() if case.name == "single/volume")
    with running(Bench(tiny_model)) as bench:
        bench.says = '<tool_call>\n{"name": "set_volume", "arguments": {"level": 35}}\n</tool_call>'
        async with Chat(bench.url) as chat:
            scores = await eval_tasks.tools(tool_use.TASK, [case], None).ask(chat, 0, lambda _: None)
    assert scores.cases[0].passed, scores.cases[0].detail

"""Measures what the server adds to a request, compared with a bare FastAPI echo of the same payload.

Each runs in its own process under uvicorn with the same settings. Our server has its real API, renderer and
tokenizer (the embedded model's), with a sampler that answers at once, so that only the server is measured.
The other wires are compared with chat completions, whole and streamed, on the same conversations. The last table has
agents with long prompts, each with a conversation of its own, at a server that records them and at one that does not;
and the first requests of conversations whose user has hundreds of notes and examples; and what a server that records
adds in front of another API, which is our own.
"""

import asyncio
import gc
import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import uvicorn
from common import argument_parser, machine, model_folder, percentile, sized, table, verdict
from fastapi import FastAPI

from openclaw_rl.engines.base import EngineLimits, EngineStats, SamplerCapabilities
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.types import BASE_VERSION, FinishReason, SampledToken, SampleRequest

CLIENTS = sized(64, 4)
REQUESTS = sized(6000, 16)
SINGLE_REQUESTS, WARM_UP = sized((400, 300), (4, 4))
AGENT_TURNS = sized(40, 2)
ROUNDS = sized(3, 1)
WIRE_REQUESTS = sized(200, 2)
#: Turns of each agent's conversation: of one agent alone, and of each of many at once.
LONE_TURNS, RECORDED_TURNS = sized((40, 8), (2, 2))
#: Notes and examples of a user: as many as a prompt has in any case, and far more.
FEW_NOTES, MANY_NOTES = (40, 2), sized((300, 50), (6, 3))
ANSWER = "Sure, here is a short answer to that question of yours."

Body = dict[str, Any]


class InstantSampler:
    """Implements `Sampler`: every request gets the same completion, at once."""

    limits = EngineLimits(max_context_tokens=1 << 20, max_sequences=CLIENTS, max_choices=CLIENTS)
    newest_version = BASE_VERSION
    capabilities = SamplerCapabilities(loads=frozenset())

    def __init__(self, ids: list[int]) -> None:
        self.tokens = [SampledToken(0, id, -0.5) for id in ids[:-1]]
        self.tokens.append(SampledToken(0, ids[-1], -0.5, finish=FinishReason.STOP))

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, version: int, policy: object) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(True, 0, 0, 0)

    def sample(self, request: SampleRequest) -> "InstantStream":
        return InstantStream(self.tokens)


class InstantStream:
    version, cached_tokens = BASE_VERSION, 0

    def __init__(self, tokens: list[SampledToken]) -> None:
        self.tokens = tokens

    async def __aiter__(self) -> AsyncIterator[list[SampledToken]]:
        yield self.tokens

    def drop(self, index: int) -> None: ...

    def close(self) -> None: ...


def serve_echo(port: int) -> None:
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def echo(body: dict[str, object]) -> dict[str, object]:
        return body

    serve(app, port)


def serve(app: FastAPI, port: int) -> None:
    # As our server does, so that the garbage collector need not look at what stays.
    gc.freeze()
    uvicorn.run(app, port=port, log_level="error", access_log=False, lifespan="off")


def serve_ours(port: int, ledger: Ledger | None = None, notes: NotesOptions | None = None) -> None:
    from openclaw_rl.api.app import create_app
    from openclaw_rl.api.completion import TokenSettings
    from openclaw_rl.api.service import ChatService
    from openclaw_rl.rendering.chat import ChatRenderer

    renderer = ChatRenderer(model_folder())
    ids = [*renderer.tokenizer.backend.encode(ANSWER).ids, *renderer.tokenizer.eos_ids]
    app = create_app(ChatService(InstantSampler(ids), renderer, TokenSettings(), ledger=ledger, notes=notes), "bench")
    serve(app, port)


def serve_recording(folder: Path, port: int) -> None:
    serve_ours(port, Ledger(folder))


def serve_noting(folder: Path, notes: int, examples: int, port: int) -> None:
    """A server whose only user has this many notes and examples."""
    from openclaw_rl.api.auth import ANYONE
    from openclaw_rl.ledger.notes import add, add_example

    ledger = Ledger(folder)
    for number in range(notes):
        ledger.submit(add, ANYONE, f"Mention fact {number} of topic {number % 40} where it fits.").result(60)
    for number in range(examples):
        ledger.submit(add_example, ANYONE, f"What is fact {number} about?", ANSWER).result(60)
    serve_ours(port, ledger, NotesOptions())


def serve_front(folder: Path, api: int, port: int) -> None:
    """A server that records, in front of the API at a port."""
    from openclaw_rl.api.app import create_app
    from openclaw_rl.api.completion import TokenSettings
    from openclaw_rl.api.service import ChatService
    from openclaw_rl.engines.upstream.sampler import UpstreamSampler, UpstreamSettings
    from openclaw_rl.rendering.chat import MessageRenderer

    settings = UpstreamSettings([f"http://127.0.0.1:{api}/v1"], "bench", "", 60, None, CLIENTS, CLIENTS)
    service = ChatService(UpstreamSampler(settings), MessageRenderer(), TokenSettings(), ledger=Ledger(folder))
    serve(create_app(service, "bench"), port)


class Server:
    """A server in its own process, ready when the block starts."""

    def __init__(self, target: object) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.process: BaseProcess = context.Process(target=target, args=(self.port,), daemon=True)

    def __enter__(self) -> "Server":
        self.process.start()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.05)
        raise TimeoutError("the server did not start")

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join()


class Connection:
    """One keep-alive connection. The client is minimal, because it shares the machine with the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 22))

    async def post(self, payload: bytes) -> bytes:
        self.writer.write(payload)
        head = await self.reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        if b"transfer-encoding: chunked" in head.lower():
            return await self.reader.readuntil(b"\r\n0\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return await self.reader.readexactly(length)

    async def first_word(self, payload: bytes) -> float:
        """Milliseconds until the first word of a streamed answer."""
        start = time.perf_counter()
        self.writer.write(payload)
        await self.reader.readuntil(ANSWER[:3].encode())
        took = time.perf_counter() - start
        await self.reader.readuntil(b"\r\n0\r\n\r\n")
        return took * 1e3


def payload(body: Body, path: str = "chat/completions") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST /v1/{path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head = "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""])
    return head.encode() + content


def short_chat() -> Body:
    return {"model": "bench", "messages": [{"role": "user", "content": "Hello, what can you do for me today?"}]}


def agent_turns(turns: int, task: str = "", answer: str = ANSWER * 6) -> list[Body]:
    """The requests of one agent's conversation: a 50 KB system prompt, 12 tools, a history that grows.

    Agents with different tasks have different conversations. `answer` is what the history says that the model said.
    """
    words = "You are a careful agent. Use your tools one step at a time. Rule {}: do what the owner wants.\n"
    system = "".join(words.format(number) for number in range(620))
    properties = {f"argument_{i}": {"type": "string", "description": "what it is for"} for i in range(6)}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": "Does one thing well. " * 10,
                "parameters": {"type": "object", "properties": properties, "required": ["argument_0"]},
            },
        }
        for i in range(12)
    ]
    messages: list[Body] = [{"role": "system", "content": system}]
    requests: list[Body] = []
    for turn in range(turns):
        messages = [
            *messages,
            {"role": "user", "content": f"Step {turn}{task}: look at the next file and tell me more. " * 8},
        ]
        requests.append({"model": "bench", "messages": messages, "tools": tools})
        messages = [*messages, {"role": "assistant", "content": answer}]
    return requests


def as_messages(body: Body) -> Body:
    """A chat request as Anthropic's clients write it."""
    system = [message["content"] for message in body["messages"] if message["role"] == "system"]
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in body.get("tools", ()))
    ]
    said = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
        for message in body["messages"]
        if message["role"] != "system"
    ]
    return {"model": "bench", "max_tokens": 1000, "system": "".join(system), "messages": said, "tools": tools}


def as_responses(body: Body) -> Body:
    """A chat request as clients of the Responses API write it."""
    kinds = {"user": "input_text", "assistant": "output_text"}
    items = [
        {
            "type": "message",
            "role": message["role"],
            "content": [{"type": kinds[message["role"]], "text": message["content"]}],
        }
        for message in body["messages"]
        if message["role"] != "system"
    ]
    system = [message["content"] for message in body["messages"] if message["role"] == "system"]
    tools = [{"type": "function", **tool["function"]} for tool in body.get("tools", ())]
    return {"model": "bench", "instructions": "".join(system), "input": items, "tools": tools}


#: The path of each wire, and how it writes a chat request.
WIRES = {
    "chat/completions": lambda body: body,
    "messages": as_messages,
    "responses": as_responses,
}


async def measure_wires(port: int) -> None:
    """What the other wires cost more than chat, in ms."""
    agent = agent_turns(AGENT_TURNS)[-1]
    cases = {"short chat": short_chat(), f"agent, {len(agent['messages'])} messages": agent}
    rows = []
    for case, body in cases.items():
        for kind, extra in (("whole", {}), ("streamed", {"stream": True})):
            payloads = [payload({**write(body), **extra}, path) for path, write in WIRES.items()]
            chat, *others = await alternating(port, payloads)
            # Each request is compared with the chat request next to it: a busy machine slows both.
            added = [median(mine - its for mine, its in zip(other, chat, strict=True)) for other in others]
            cells = [f"{median(other):.2f} ({more:+.2f})" for other, more in zip(others, added, strict=True)]
            rows.append((f"{case}, {kind}", f"{median(chat):.2f}", *cells, verdict(max(added), 0.7, False)))
    table("Wires, p50 ms, and how much more than chat", ("", *WIRES, "target"), rows)


async def alternating(port: int, payloads: list[bytes]) -> list[list[float]]:
    """Milliseconds of each payload's requests, sent in turn, each payload on a connection of its own."""
    connections = [await Connection.open(port) for _ in payloads]
    times: list[list[float]] = [[] for _ in payloads]
    for number in range(WARM_UP // 10 + WIRE_REQUESTS):
        for connection, data, measured in zip(connections, payloads, times, strict=True):
            start = time.perf_counter()
            await connection.post(data)
            if number >= WARM_UP // 10:
                measured.append((time.perf_counter() - start) * 1e3)
    return times


async def latencies(port: int, payloads: list[bytes]) -> list[float]:
    """Milliseconds of requests one after another."""
    connection = await Connection.open(port)
    times = []
    for data in payloads:
        start = time.perf_counter()
        await connection.post(data)
        times.append((time.perf_counter() - start) * 1e3)
    return times


async def throughput(port: int, data: bytes) -> float:
    """Requests per second of many clients at once."""
    connections = [await Connection.open(port) for _ in range(CLIENTS)]

    async def client(connection: Connection, count: int) -> None:
        for _ in range(count):
            await connection.post(data)

    await asyncio.gather(*(client(connection, 5) for connection in connections))
    start = time.perf_counter()
    await asyncio.gather(*(client(connection, REQUESTS // CLIENTS) for connection in connections))
    return REQUESTS // CLIENTS * CLIENTS / (time.perf_counter() - start)


async def measure(echo: int, ours: int) -> None:
    short = payload(short_chat())
    conversation = [payload(body) for body in agent_turns(AGENT_TURNS)]
    for port in (echo, ours):
        await latencies(port, [short] * WARM_UP)
    # Alternating, so that a slow phase of the machine affects both.
    rates: dict[int, list[float]] = {echo: [], ours: []}
    singles: dict[int, list[float]] = {echo: [], ours: []}
    for _ in range(ROUNDS):
        for port in (echo, ours):
            rates[port].append(await throughput(port, short))
            singles[port] += await latencies(port, [short] * SINGLE_REQUESTS)
    turns = {port: await latencies(port, conversation) for port in (echo, ours)}
    share = max(rates[ours]) / max(rates[echo])
    added = median(singles[ours]) - median(singles[echo])
    first_added = turns[ours][0] - turns[echo][0]
    follow_added = median(turns[ours][1:]) - median(turns[echo][1:])
    p99 = percentile(turns[ours][1:], 0.99)
    rows = [
        (
            "short chat, p50 ms",
            median(singles[echo]),
            median(singles[ours]),
            f"+{added:.2f}",
            verdict(added, 0.3, False),
        ),
        (
            f"{CLIENTS} clients, requests/s",
            max(rates[echo]),
            max(rates[ours]),
            f"×{share:.2f}",
            verdict(share, 0.55),
        ),
        ("agent, first turn, ms", turns[echo][0], turns[ours][0], f"+{first_added:.1f}", ""),
        (
            "agent, follow-up turn, p50 ms",
            median(turns[echo][1:]),
            median(turns[ours][1:]),
            f"+{follow_added:.2f}",
            verdict(follow_added, 2, False),
        ),
        ("agent, follow-up turn, p99 ms", percentile(turns[echo][1:], 0.99), p99, "", ""),
    ]
    cells = [(name, f"{a:.2f}", f"{b:.2f}", difference, target) for name, a, b, difference, target in rows]
    size = len(conversation[0]) // 1000
    title = f"Serving ({machine()}; agent request {size} KB, {len(ANSWER.split())}-word answers)"
    table(title, ("", "echo", "ours", "difference", "target"), cells)


async def agents(port: int, clients: int, turns: int) -> tuple[list[float], float]:
    """Agents at once, each with a new conversation: milliseconds of their follow-up turns, and requests per second."""
    tasks = [f" of {clients} tasks, task {number}" for number in range(clients)]
    conversations = [[payload(body) for body in agent_turns(turns, task, ANSWER)] for task in tasks]
    start = time.perf_counter()
    times = await asyncio.gather(*(latencies(port, conversation) for conversation in conversations))
    rate = clients * turns / (time.perf_counter() - start)
    return [milliseconds for own in times for milliseconds in own[1:]], rate


async def measure_notes(ports: list[int]) -> None:
    """What notes and examples cost the first request of a conversation, apart from the tokens that they add."""
    connections = [await Connection.open(port) for port in ports]
    times: list[list[float]] = [[] for _ in ports]
    for number in range(WARM_UP // 10 + WIRE_REQUESTS):
        asked = {"model": "bench", "messages": [{"role": "user", "content": f"What is fact {number} about?"}]}
        for connection, measured in zip(connections, times, strict=True):
            start = time.perf_counter()
            await connection.post(payload(asked))
            if number >= WARM_UP // 10:
                measured.append((time.perf_counter() - start) * 1e3)
    # Each request is compared with the one next to it: a busy machine slows both.
    few, many = (median(mine - its for mine, its in zip(other, times[0], strict=True)) for other in times[1:])
    rows = [
        ("none", f"{median(times[0]):.2f}", "", ""),
        (f"{FEW_NOTES[0]} notes, {FEW_NOTES[1]} examples", f"{median(times[1]):.2f}", f"+{few:.2f}", ""),
        (
            f"{MANY_NOTES[0]} notes, {MANY_NOTES[1]} examples",
            f"{median(times[2]):.2f}",
            f"+{many:.2f}",
            verdict(many - few, 1, False),
        ),
    ]
    head = ("notes in the ledger", "p50 ms", "more than without", "many over few")
    table(f"First request of a conversation ({machine()})", head, rows)


async def measure_recording(ports: list[int]) -> None:
    """What recording costs: the echo, our server without recording, and our server that records."""
    rows: list[tuple[str, ...]] = []
    for clients, turns in ((1, LONE_TURNS), (CLIENTS, RECORDED_TURNS)):
        measured = [await agents(port, clients, turns) for port in ports]
        who = f"{clients} agent{'s' if clients > 1 else ''}"
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            echo, ours, recording = (percentile(times, share) for times, _rate in measured)
            cells = (f"{echo:.2f}", f"{ours:.2f}", f"{recording:.2f}", f"+{recording - ours:.2f}")
            rows.append((f"{who}, follow-up turn, {name} ms", *cells))
        rates = [rate for _times, rate in measured]
        rows.append((f"{who}, requests/s", *(f"{rate:.0f}" for rate in rates), f"×{rates[2] / rates[1]:.2f}"))
    head = ("", "echo", "ours, not recording", "ours, recording", "for recording")
    table(f"Agents with {len(payload(agent_turns(1)[0])) // 1000} KB prompts ({machine()})", head, rows)


async def measure_front(api: int, front: int) -> None:
    """What a server in front of another API adds to the first word of its answer, and how many clients it serves."""
    connections = [await Connection.open(port) for port in (api, front)]
    times: list[list[float]] = [[], []]
    for number in range(WARM_UP // 10 + WIRE_REQUESTS):
        asked = {"model": "bench", "stream": True, "messages": [{"role": "user", "content": f"Question {number}?"}]}
        for connection, measured in zip(connections, times, strict=True):
            took = await connection.first_word(payload(asked))
            if number >= WARM_UP // 10:
                measured.append(took)
    added = median(ours - its for its, ours in zip(*times, strict=True))
    short = payload(short_chat())
    rates = [await throughput(port, short) for port in (api, front)]
    bare, through = (median(measured) for measured in times)
    rows = [
        ("first word, p50 ms", f"{bare:.2f}", f"{through:.2f}", f"+{added:.2f}", verdict(added, 2, False)),
        (f"{CLIENTS} clients, requests/s", *(f"{rate:.0f}" for rate in rates), f"×{rates[1] / rates[0]:.2f}", ""),
    ]
    table(f"In front of another API ({machine()})", ("", "the API", "through us", "difference", "target"), rows)


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    with Server(serve_echo) as echo_server, Server(serve_ours) as our_server:
        asyncio.run(measure(echo_server.port, our_server.port))
        asyncio.run(measure_wires(our_server.port))
        with (
            tempfile.TemporaryDirectory() as scratch,
            Server(partial(serve_recording, Path(scratch))) as recording_server,
        ):
            asyncio.run(measure_recording([echo_server.port, our_server.port, recording_server.port]))
        with (
            tempfile.TemporaryDirectory() as scratch,
            Server(partial(serve_noting, Path(scratch) / "none", 0, 0)) as without,
            Server(partial(serve_noting, Path(scratch) / "few", *FEW_NOTES)) as few_notes,
            Server(partial(serve_noting, Path(scratch) / "many", *MANY_NOTES)) as many_notes,
        ):
            asyncio.run(measure_notes([without.port, few_notes.port, many_notes.port]))
        with (
            tempfile.TemporaryDirectory() as scratch,
            Server(partial(serve_front, Path(scratch), our_server.port)) as front_server,
        ):
            asyncio.run(measure_front(our_server.port, front_server.port))

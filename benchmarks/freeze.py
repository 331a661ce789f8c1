"""Measures how long one hostile request keeps everybody else waiting: the worst delay of another client's /healthz.

The baseline is a server that reads a request in the obvious way: it parses the body, renders the chat, and tokenises
it with `tokenizer.encode` in a thread. Its requests have two megabytes; larger ones would stop it for minutes. Ours has
its real API, renderer, tokenizer and ledger, with a sampler that answers at once. Each server runs in a process of its
own. While a request of each kind is read, another client asks for /healthz every few milliseconds.
"""

import json
import socket
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from common import argument_parser, machine, model_folder, sized, table, verdict
from serving import ANSWER, InstantSampler, Server

from openclaw_rl.engines.base import EngineLimits

BASELINE_MB = sized(2.0, 0.01)
MAX_DELAY_MS = 250
#: How long a request may take before its delay so far is reported.
MAX_SECONDS = 60
PROBE_INTERVAL_SECONDS = 0.005
AT_ONCE = 8
NUMBER_OF_KINDS = sized(15, 2)
USER = b'{"role":"user","content":"%s"}'


def renderer() -> Any:
    from openclaw_rl.rendering.chat import ChatRenderer

    return ChatRenderer(model_folder())


def serve_plainly(port: int) -> None:
    import asyncio

    from fastapi import FastAPI, Request

    from openclaw_rl.api.wire import ChatRequest, parse

    app, chats = FastAPI(), renderer()

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> int:
        body = parse(ChatRequest, await request.body())
        messages = [message.model_dump(exclude_none=True) for message in body.messages]
        text = chats.text(messages, body.offered_tools, body.chat_template_kwargs)
        return len(await asyncio.to_thread(chats.tokenizer.backend.encode, text))

    uvicorn.run(app, port=port, log_level="critical", access_log=False, lifespan="off")


def serve_ours(port: int, context: int, mb: float) -> None:
    import gc

    from openclaw_rl.api.app import create_app
    from openclaw_rl.api.completion import TokenSettings
    from openclaw_rl.api.service import ChatService
    from openclaw_rl.ledger.store import Ledger

    chats = renderer()
    sampler = InstantSampler([*chats.tokenizer.backend.encode(ANSWER).ids, *chats.tokenizer.eos_ids])
    sampler.limits = EngineLimits(context, max_sequences=64, max_choices=64)
    with tempfile.TemporaryDirectory() as folder:
        service = ChatService(sampler, chats, TokenSettings(), ledger=Ledger(Path(folder)))
        app = create_app(service, "bench", max_body_bytes=int(mb * 1e6))
        gc.freeze()
        uvicorn.run(app, port=port, log_level="critical", access_log=False, lifespan="off")


def repeated(size: int, item: bytes, around: bytes) -> bytes:
    """A body of the size that repeats an item; `around` has `%s` in its place."""
    return around % b",".join([item] * ((size - len(around)) // (len(item) + 1)))


def text(size: int, word: bytes) -> bytes:
    return b'{"messages":[%s]}' % (USER % (word * ((size - 60) // len(word))))


def values_in_arguments(size: int) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f"[{'[],' * (size // 3 - 80)}[]]"}}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()


def tool_schema(size: int) -> bytes:
    properties = {f"p{i}": {"type": "string"} for i in range(size // 32)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": function}]}
    return json.dumps(body).encode()


#: A request of each kind, by its size in bytes.
KINDS = {
    "ordinary text": partial(text, word=b"The quick brown fox said, that 42 people went to the market. "),
    "control tokens": partial(text, word=b"<|im_end|>"),
    "one long word": partial(text, word=b"x"),
    "spaces": partial(text, word=b" "),
    "escaped line ends": partial(text, word=b"\\n"),
    "escaped letters": partial(text, word=b"\\u00e9"),
    "tiny messages": partial(repeated, item=USER % b"", around=b'{"messages":[%s]}'),
    "all messages allowed": lambda size: repeated(min(size, 440_000), USER % b"", b'{"messages":[%s]}'),
    "wrong messages": partial(repeated, item=b"{}", around=b'{"messages":[%s]}'),
    "text parts": partial(
        repeated, item=b'{"type":"text","text":""}', around=b'{"messages":[{"role":"user","content":[%s]}]}'
    ),
    "tool calls": partial(
        repeated,
        item=b'{"function":{"name":"a"}}',
        around=b'{"messages":[{"role":"assistant","tool_calls":[%s]}]}',
    ),
    "values in arguments": values_in_arguments,
    "tool schema": tool_schema,
    "template values": partial(
        repeated, item=b"[]", around=b'{"messages":[' + USER % b"hi" + b'],"chat_template_kwargs":{"a":[%s]}}'
    ),
    "deep": lambda size: b'{"messages":' + b"[" * (size - 20),
    "digits": lambda size: b'{"messages":[' + USER % b"hi" + b'],"seed":' + b"9" * (size - 100) + b"}",
}


def post(port: int, body: bytes) -> int:
    """Send a chat request; the status, or 0 if no answer came in time."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=MAX_SECONDS) as client:
        try:
            client.sendall(head.encode() + body)
            return int(client.recv(65536).split()[1])
        except (TimeoutError, ConnectionError):
            return 0


def healthz_seconds(port: int) -> float:
    """How long a new client waits for /healthz."""
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=10 * MAX_SECONDS) as probe:
        probe.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not probe.recv(4096).startswith(b"HTTP/1.1 200"):
            raise RuntimeError("the server does not answer")
    return time.perf_counter() - began


def worst_delay(port: int, body: bytes, at_once: int = 1) -> tuple[float, int]:
    """The longest time in milliseconds that /healthz took while requests were read, and their status."""
    statuses: list[int] = []
    senders = [threading.Thread(target=lambda: statuses.append(post(port, body))) for _ in range(at_once)]
    for sender in senders:
        sender.start()
    delays = [0.0]
    while any(sender.is_alive() for sender in senders):
        delays.append(healthz_seconds(port))
        time.sleep(PROBE_INTERVAL_SECONDS)
    return max(delays) * 1e3, max(statuses)


def measure(mb: float, context: int) -> None:
    rows = []
    limits = partial(serve_ours, context=context, mb=mb)
    cases = [(name, kind, 1) for name, kind in list(KINDS.items())[:NUMBER_OF_KINDS]]
    cases.append((f"ordinary text, {AT_ONCE} at once", KINDS["ordinary text"], AT_ONCE))
    with Server(serve_plainly) as baseline, Server(limits) as ours:
        for server in (baseline, ours):
            worst_delay(server.port, text(1000, b"warm up "))
        for name, kind, at_once in cases:
            plain, _ = worst_delay(baseline.port, kind(int(BASELINE_MB * 1e6)))
            small, _ = worst_delay(ours.port, kind(int(BASELINE_MB * 1e6)), at_once)
            large, status = worst_delay(ours.port, kind(int(mb * 1e6)), at_once)
            worst = max(small, large)
            print(f"{name}: {plain:.0f}, {small:.0f}, {large:.0f} ms", flush=True)
            rows.append(
                (name, f"{plain:.0f}", f"{small:.0f}", f"{large:.0f}", str(status), verdict(worst, MAX_DELAY_MS, False))
            )
    title = f"Worst delay of /healthz in ms while a request is read ({machine()}; context {context})"
    size = f"{BASELINE_MB:g} MB"
    table(title, ("request", f"plain, {size}", f"ours, {size}", f"ours, {mb:g} MB", "status", "target"), rows)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--mb", type=float, default=sized(8.0, 0.02), help="size of the large requests")
    parser.add_argument("--context", type=int, default=8192, help="context of the model that ours serves")
    options = parser.parse_args()
    measure(options.mb, options.context)

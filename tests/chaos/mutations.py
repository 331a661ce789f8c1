"""Makes hostile requests from valid ones. The same seed and number always give the same request."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from chaos.seeds import ANSWER_ID, ANSWER_TEXT, CHAT, ODD_KEYS, ODD_TEXTS, ODD_VALUES, RAW, SEEDS, assistant, user
from support.raw_http import request_bytes

#: One request in so many is large.
LARGE_EVERY = 500
LARGE_BYTES = (100_000, 1_500_000)
LARGE_TEXTS = ("hello world ", "<|im_end|>", "é", "\n", "no, shorter please ", "```", "thanks! ", "a", "1. ", "error: ")
#: Mutations of one request.
MAX_MUTATIONS = 3

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "root", "User", "")
METHODS = ("GET", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "POST")
PATHS = (
    "/",
    "//",
    "/v1",
    "/v1/",
    "/v1/chat/completions/",
    "//v1/chat/completions",
    "/v1/chat/completions?stream=true&x=%00",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions%00",
    "/chat/completions",
    "/V1/CHAT/COMPLETIONS",
    "/v1/../v1/models",
    "/v1/%2e%2e/%2e%2e/etc/passwd",
    "/v1/models/" + "x" * 3000,
    "/v1/models/%ff%fe",
    "/v1/models/\ud83d",
    "/v1/sessions/%2F%2e%2e/close",
    "/v1/sessions//close",
    "/openapi.json",
    "/docs",
    "/static/../../../etc/passwd",
    "*",
    "http://example.com/v1/models",
    "/" + "a/" * 500,
)
HEADERS = (
    ("Authorization", "Bearer x"),
    ("Authorization", "Basic " + "A" * 2000),
    ("Host", "example.com"),
    ("Host", ""),
    ("Origin", "http://example.com"),
    ("Content-Type", "text/plain"),
    ("Content-Type", "multipart/form-data; boundary=x"),
    ("Content-Type", "application/json; charset=utf-16"),
    ("Content-Encoding", "gzip"),
    ("Accept", "text/html"),
    ("Accept-Encoding", "br;q=nan"),
    ("Expect", "100-continue"),
    ("Connection", "close"),
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Upgrade", "h2c"),
    ("X-Forwarded-For", "8.8.8.8"),
    ("X-HTTP-Method-Override", "DELETE"),
    ("Range", "bytes=0-1"),
    ("Cookie", "a=b; " * 300),
    ("X-Session-Id", "\ud83d\ud83d"),
    ("X-Session-Id", "x" * 5000),
    ("X-Session-Id", "a:9999999999999999999999"),
    ("X-Session-Done", "perhaps"),
    ("X-Turn-Type", "nonsense"),
    ("x-session-affinity", ":1:2:3"),
)
#: Bytes that are no HTTP request. The server may answer them or just close the connection.
BAD_HTTP = (
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /healthz HTTP/9.9\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}garbage\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nBad Header: x\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nA: \x00\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Session-Affinity: \x01\r\n\r\n",
    b"GET /healthz HTTP/1.1\nHost: 127.0.0.1\n\n",
    b"GET /a b c HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    bytes(range(256)) * 8,
)


@dataclass(frozen=True)
class FuzzRequest:
    """A request, the bytes that are sent, and what kind of answer may come."""

    wire: bytes
    method: str = "GET"
    path: str = "/"
    bad_http: bool = False
    """The bytes are no HTTP request."""


@dataclass(frozen=True)
class Draft:
    """A request while it is mutated."""

    method: str
    path: str
    body: Any
    headers: dict[str, str]
    spoil: Callable[[random.Random, bytes], bytes] = field(default=lambda draw, body: body)
    """The last change, to the encoded body."""


def fuzz_request(seed: int, number: int, answer_id: str = "chatcmpl-none", answer_text: str = "two") -> FuzzRequest:
    """The n-th request of a seed. It refers to an answer that the server gave."""
    draw = random.Random(f"{seed} {number}")
    if draw.random() < 0.02:
        return FuzzRequest(draw.choice(BAD_HTTP), bad_http=True)
    chosen = draw.choice(SEEDS)
    body = refer(copy.deepcopy(chosen.body), {ANSWER_ID: answer_id, ANSWER_TEXT: answer_text})
    draft = Draft(chosen.method, chosen.path, body, dict(chosen.headers))
    for _ in range(draw.randint(0, MAX_MUTATIONS)):
        draft = draw.choices((mutate_value, mutate_bytes, mutate_envelope), (6, 1, 2))[0](draw, draft)
    if number % LARGE_EVERY == LARGE_EVERY - 1:
        length = draw.randint(*LARGE_BYTES)
        text = (draw.choice(LARGE_TEXTS) * length)[:length]
        before = [user("hello world"), assistant(answer_text)] if draw.random() < 0.5 else []
        draft = Draft("POST", CHAT, {"messages": [*before, user(text)]}, {})
    return finish(draw, draft)


def refer(value: Any, names: dict[str, str]) -> Any:
    """A value with names in place of their placeholders."""
    if isinstance(value, dict):
        return {key: refer(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [refer(item, names) for item in value]
    return names.get(value, value) if isinstance(value, str) else value


def finish(draw: random.Random, draft: Draft) -> FuzzRequest:
    """Encode a draft, with a body whose length is known or in chunks."""
    body = draft.spoil(draw, encode(draft.body)) if draft.body is not None else b""
    headers = {"Host": "127.0.0.1", "Content-Type": "application/json", **draft.headers}
    if body and draw.random() < 0.1:
        headers["Transfer-Encoding"] = "chunked"
        cut = draw.randint(0, len(body))
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part) + b"0\r\n\r\n"
    else:
        headers["Content-Length"] = str(len(body))
    wire = request_bytes(draft.method, draft.path, headers, body)
    return FuzzRequest(wire, draft.method, draft.path)


def encode(body: Any) -> bytes:
    text = json.dumps(body)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        places(value[key], found)
    return found


def mutate_value(draw: random.Random, draft: Draft) -> Draft:
    """Change one value of the body."""
    spots = places(draft.body, [])
    if not spots or draw.random() < 0.02:
        return replace(draft, body=copy.deepcopy(draw.choice(ODD_VALUES)))
    container, key = draw.choice(spots)
    match draw.randint(0, 6):
        case 0 if isinstance(container, dict):
            container[draw.choice(ODD_KEYS)] = container.pop(key)
        case 1:
            del container[key]
        case 2 if isinstance(container, list):
            container.extend(copy.deepcopy(container[key]) for _ in range(draw.choice((1, 30))))
        case 3 if isinstance(container, dict) and "role" in container:
            container["role"] = draw.choice(ROLES)
        case 4 if isinstance(container[key], str):
            place = draw.randint(0, len(container[key]))
            container[key] = container[key][:place] + draw.choice(ODD_TEXTS) + container[key][place:]
        case 5:
            container[key] = {"a": [container[key]]} if draw.random() < 0.5 else [container[key]]
        case _:
            container[key] = copy.deepcopy(draw.choice(ODD_VALUES))
    return draft


def mutate_bytes(_draw: random.Random, draft: Draft) -> Draft:
    """Spoil the encoded body."""
    return replace(draft, spoil=spoil)


def spoil(draw: random.Random, body: bytes) -> bytes:
    place = draw.randint(0, len(body))
    match draw.randint(0, 7):
        case 0:
            return body[:place]
        case 1:
            return body[:place] + draw.randbytes(draw.randint(1, 8)) + body[place:]
        case 2:
            return body[:place] + body[place + draw.randint(1, 20) :]
        case 3:
            return body + body
        case 4:
            return body.decode().encode(draw.choice(("utf-16", "utf-32", "utf-8-sig")))
        case 5:
            return b" " * draw.randint(0, 10_000)
        case 6:
            return draw.randbytes(draw.randint(1, 500))
        case _:
            return b"\x1f\x8b\x08" + body


def mutate_envelope(draw: random.Random, draft: Draft) -> Draft:
    """Change the method, the path or a header."""
    match draw.randint(0, 3):
        case 0:
            return replace(draft, method=draw.choice(METHODS))
        case 1:
            return replace(draft, path=draw.choice(PATHS))
        case _:
            name, value = draw.choice(HEADERS)
            return replace(draft, headers={**draft.headers, name: value})

"""A small OpenAI-compatible API on a real socket, as Ollama or a cloud has one. The test decides what it says."""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from support.judge_server import QuietServer, serve

Body = dict[str, Any]


@dataclass
class Said:
    """An answer: its deltas, or an error."""

    deltas: list[Body] = field(default_factory=list)
    finish: str | None = "stop"
    """None: the answer breaks off after its deltas."""
    status: int = 200
    error: Any = None
    """What the API calls it; bytes are a page."""
    headers: dict[str, str] = field(default_factory=dict)
    silent: float = 0.0
    """Seconds before the first delta."""
    pause: float = 0.0
    """Seconds before each delta."""
    streams: bool = True


def words(*texts: str, **settings: Any) -> Said:
    """An answer in these pieces."""
    return Said([{"content": text} for text in texts], **settings)


def refusal(status: int, message: str, **headers: str) -> Said:
    return Said(status=status, error={"message": message, "code": None}, headers=headers)


class ChatApi:
    """The API. `answer` is called for each request, in a thread of its own."""

    def __init__(self, answer: Callable[[Body], Said] = lambda _body: words("hello ", "world")) -> None:
        self.answer = answer
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.left: list[str] = []
        """Requests whose client went away."""
        self.models: list[Body] = [{"id": "their-model", "object": "model", "max_model_len": 4096}]
        self.listing: Said | None = None
        """What a request for the models gets instead of them."""
        self._port = 0
        self._server: QuietServer | None = None
        self._connections: list[socket.socket] = []
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        """Listen (again) on the same port."""
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                api._connections.append(self.connection)

            def do_GET(self) -> None:
                if api.listing is not None:
                    self.refuse(api.listing)
                else:
                    self.whole(200, {"object": "list", "data": api.models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.requests.append(body)
                api.headers.append(dict(self.headers))
                api.paths.append(self.path)
                said = api.answer(body)
                if said.error is not None and not said.deltas:
                    self.refuse(said)
                elif said.streams:
                    self.stream(said, is_chat="messages" in body)
                else:
                    message = {"role": "assistant", "content": "".join(d["content"] for d in said.deltas)}
                    self.whole(200, {"choices": [{"index": 0, "message": message, "finish_reason": said.finish}]})

            def refuse(self, said: Said) -> None:
                page = said.error if isinstance(said.error, bytes) else {"error": said.error}
                self.whole(said.status, page, said.headers)

            def whole(self, status: int, body: Body | bytes, headers: dict[str, str] | None = None) -> None:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                every = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
                for name, value in every.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def stream(self, said: Said, *, is_chat: bool) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.flush()
                time.sleep(said.silent)
                try:
                    for event in events(said, is_chat):
                        time.sleep(said.pause)
                        data = f"data: {json.dumps(event)}\n\n".encode()
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                        self.wfile.flush()
                except OSError:
                    api.left.append(self.path)
                    raise
                if said.finish is None and said.error is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                done = b"data: [DONE]\n\n"
                self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = serve(Handler, self._port)
        self._port = self._server.server_port

    def stop(self) -> None:
        """Refuse connections from now on, and break those that there are, as a killed program does."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        while self._connections:
            with contextlib.suppress(OSError):
                self._connections.pop().shutdown(socket.SHUT_RDWR)


def events(said: Said, is_chat: bool) -> Iterator[Body]:
    head = {"id": "theirs", "object": "chat.completion.chunk", "model": "their-model"}
    for delta in said.deltas:
        part = {"delta": delta} if is_chat else {"text": delta["content"]}
        yield {**head, "choices": [{"index": 0, **part, "finish_reason": None}]}
    if said.error is not None:
        yield {"error": said.error}
    elif said.finish is not None:
        part = {"delta": {}} if is_chat else {"text": ""}
        yield {**head, "choices": [{"index": 0, **part, "finish_reason": said.finish}]}
        usage = {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
        yield {**head, "choices": [], "usage": usage}

"""A judge behind an OpenAI-compatible endpoint on a real socket. The test decides its answers."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from openclaw_rl.judge.judges.llm import QUESTIONS
from openclaw_rl.types import Question

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """An HTTP response."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def completion(*texts: str | None, **more: Any) -> Reply:
    """A chat completion with these choices."""
    choices = [{"index": i, "message": {"role": "assistant", "content": text}} for i, text in enumerate(texts)]
    return Reply(body=json.dumps({"id": "x", "object": "chat.completion", "choices": choices, **more}).encode())


def question_of(body: Body) -> Question:
    """Which of the two questions a request asks."""
    said = body["messages"][-1]["content"]
    return next(question for question, words in QUESTIONS.items() if said.endswith(words))


def opinion(score: str = "1", hint: str = "") -> Callable[[Body], Reply]:
    """A judge that always gives the same score and hint."""

    def answer(body: Body) -> Reply:
        if question_of(body) is Question.SCORE:
            text = f"Let me see. \\boxed{{{score}}}"
        else:
            text = f"[HINT_START] {hint} [HINT_END] \\boxed{{1}}" if hint else "\\boxed{-1}"
        return completion(*[text] * body["n"], usage={"prompt_tokens": 50, "completion_tokens": 4 * body["n"]})

    return answer


class QuietServer(ThreadingHTTPServer):
    """A server whose clients may come and go as they like."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect."""


def serve(handler: type[BaseHTTPRequestHandler], port: int = 0) -> QuietServer:
    """Answer on loopback, in a thread of its own; without a port, on one that is free."""
    server = QuietServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


class JudgeServer:
    """The endpoint. It calls `answer` for each request in a thread of its own, so `answer` may block."""

    def __init__(self, answer: Callable[[Body], Reply]) -> None:
        self.answer = answer
        self.requests: list[Body] = []
        self.headers: list[Message[str, str]] = []
        self.paths: list[str] = []
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def start(self) -> None:
        """Listen (again) on the same port."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.requests.append(body)
                judge.headers.append(self.headers)
                judge.paths.append(self.path)
                reply = judge.answer(body)
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = serve(Handler, self._port)
        self._port = self._server.server_port

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

"""A server for episodes that does what a test tells it to, and keeps what it was sent."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Body = dict[str, Any]
#: Makes the answer to the n-th request of a session.
Script = Callable[[str, int], Response | None]


def completion(number: int, version: int = 0, **message: Any) -> JSONResponse:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "system_fingerprint": f"policy-{version}"}
    return JSONResponse({**head, "choices": [choice]})


def refusal(status: int, message: str = "no", code: str | None = None, **headers: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": code}}, status, headers)


class EpisodeServer:
    """Answers `says`, unless `script` or `on_reward` have another answer for the n-th request of a session."""

    def __init__(self) -> None:
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/sessions/{name}/reward", self.reward, methods=["POST"]),
                Route("/readyz", self.readyz),
                Route("/v1/models", self.models),
            ]
        )
        self.url = ""
        self.says, self.version = "hello", 0
        self.script: Script = lambda session, number: None
        self.on_reward: Script = lambda session, number: None
        self.state: Body = {"ready": True, "policy_version": 0}
        self.requests: dict[str, list[Body]] = {}
        self.headers: list[dict[str, str]] = []
        self.rewards: dict[str, list[Body]] = {}
        self.running = self.most_running = 0
        self.seconds = 0.0

    async def chat(self, request: Request) -> Response:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            session = request.headers["x-session-id"]
            body = json.loads(await request.body())
            self.headers.append(dict(request.headers))
            bodies = self.requests.setdefault(session, [])
            bodies.append(body)
            await asyncio.sleep(self.seconds)
            number = sum(map(len, self.requests.values()))
            return self.script(session, len(bodies)) or completion(number, self.version, content=self.says)
        finally:
            self.running -= 1

    async def reward(self, request: Request) -> Response:
        session, body = request.path_params["name"], json.loads(await request.body())
        bodies = self.rewards.setdefault(session, [])
        bodies.append(body)
        return self.on_reward(session, len(bodies)) or JSONResponse({"id": session, "status": "recorded"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "the-model", "object": "model"}]})

    async def readyz(self, request: Request) -> Response:
        return JSONResponse(self.state)

    @property
    def reported(self) -> list[Body]:
        """The last report about each session."""
        return [bodies[-1] for bodies in self.rewards.values()]

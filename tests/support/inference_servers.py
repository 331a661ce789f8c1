"""Servers that speak vLLM's dialect without a model, in this process, for tests of everything but tokens."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import Request, Response

from openclaw_rl.types import FinishReason, SampledToken, SampleRequest, ScoreRequest, Scores, TopTokens
from support.model_server import NoSuchModel, Pausable
from support.server_program import free_port
from support.vllm_double import create

LOGPROB = -0.5


class NoModel(Pausable):
    """In place of a `ModelServer`: counts upwards, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0
        """The number at the end of the name of the folder whose weights it has; 0 for the base model."""
        self.refuses = 0
        """How many times it will fail to replace its weights."""
        self.slots: dict[str, int] = {}
        self.asked: list[SampleRequest] = []
        self.pause_seconds = 0.0
        """Seconds before each token."""
        self.heat = 1.0
        """What the log-probs of samples are multiplied by; 1 if they are raw."""

    def load(self, name: str, folder: Path) -> str | None:
        self.slots[name] = len(self.slots) + 1
        return None

    def replace_weights(self, folder: Path) -> str | None:
        if self.refuses or not folder.is_dir():
            self.refuses -= bool(self.refuses)
            return f"no weights in {folder}"
        self.loaded = int(folder.name[1:]) if folder.name.startswith("v") else 0
        return None

    def empty_cache(self) -> None: ...

    def slot(self, name: str | None, base: str | None) -> int:
        if name != base and name not in self.slots:
            raise NoSuchModel(name)
        return self.slots.get(name or "", 0)

    async def sample(self, request: SampleRequest, slot: int) -> AsyncIterator[tuple[list[SampledToken], int]]:
        self.asked.append(request)
        for number in range(request.params.max_tokens):
            await asyncio.sleep(self.pause_seconds)
            last = number == request.params.max_tokens - 1
            finish = FinishReason.LENGTH if last else None
            yield [SampledToken(0, 100 * (slot or self.loaded) + number, LOGPROB * self.heat, (), finish)], 0

    async def score(self, request: ScoreRequest, slot: int) -> Scores:
        count = request.last_n
        top = TopTokens(np.zeros((count, 1), np.int32), np.full((count, 1), LOGPROB, np.float32))
        return Scores([LOGPROB] * count, top)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def restarted(self) -> "NoModel":
        """The same after its process was started again."""
        new = NoModel()
        new.asked, new.pause_seconds, new.heat, new.refuses = self.asked, self.pause_seconds, self.heat, self.refuses
        return new


class ServerDouble:
    """One server, which can be stopped and started again on the same port."""

    def __init__(self, **options: Any) -> None:
        self.port = free_port()
        defaults = {
            "served_model_name": "base",
            "max_model_len": 257,
            "max_logprobs": 20,
            "max_lora_rank": 16,
            "model": "",
        }
        defaults |= {"scheduling_policy": "fcfs", "enable_scale_out": True, "scores_targets": True, "dev_mode": True}
        self.options = argparse.Namespace(**{**defaults, **options})
        self.model = NoModel()
        self.on_reload: Callable[[], Awaitable[None]] | None = None
        """Called before weights are replaced."""
        self.client_ports: set[int] = set()
        """One for each connection over which requests came."""
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start it with the base model and without any adapters."""
        self.model = self.model.restarted()
        app = create(self.model, self.options)  # type: ignore[arg-type]
        app.middleware("http")(self._note_connection)
        config = uvicorn.Config(app, port=self.port, log_level="error")
        self._server = uvicorn.Server(config)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Break off what runs, and leave the port."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            for state in list(self._server.server_state.connections):
                state.transport.abort()  # type: ignore[union-attr]
            await self._task
            self._server = None

    async def _note_connection(self, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if self._server is None:
            # Accepted while the server stopped, so not among the connections that were broken off.
            return Response(status_code=503, headers={"connection": "close"})
        assert request.client is not None
        self.client_ports.add(request.client.port)
        if self.on_reload is not None and request.url.path == "/collective_rpc":
            # Not awaited: stopping the server waits for this request too.
            self._stopping = asyncio.ensure_future(self.on_reload())
            await asyncio.sleep(3600)
        return await answer(request)

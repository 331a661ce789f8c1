"""The model behind the doubles of inference servers: a worker of the local engine, and adapters by name."""

import argparse
import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, fill, open_model
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Cancel,
    LoadPolicy,
    PolicyLoaded,
    Score,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.types import SampledToken, SampleRequest, ScoreRequest, Scores

#: Adapters that can be loaded at the same time.
SLOTS = 8


class NoSuchModel(Exception):
    """A request names an adapter that is not loaded."""


class Pausable:
    """Requests that run and, while it is paused, requests that wait."""

    def __init__(self) -> None:
        self.weights = "default"
        """The name of the weights."""
        self.is_half_loaded = False
        self._resumed, self._idle = asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._running = 0

    async def pause(self) -> None:
        """Hold requests that come, and wait for those that run."""
        self._resumed.clear()
        while self._running:
            self._idle.clear()
            await self._idle.wait()

    def resume(self) -> None:
        self._resumed.set()

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """The length of a request."""
        await self._resumed.wait()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._idle.set()


class ModelServer(Pausable):
    """Samples and scores for requests that come at the same time."""

    def __init__(self, model: Path, max_sequences: int, max_rank: int) -> None:
        super().__init__()
        self.decoder = decoder = load_decoder(model, torch.float32, torch.device("cpu"))
        self.cache_age = 0
        """How often the prefix cache was emptied."""
        self.worker = Worker(
            decoder, WorkerOptions(model, "cpu", "float32", max_sequences, None, 0.05, SLOTS, max_rank)
        )
        self.slots: dict[str, int] = {}
        self.users: Counter[int] = Counter()
        """Requests that run, by slot: an adapter that was unloaded keeps its slot until they are done."""
        self.ids = count(1)
        self.answers: dict[int, asyncio.Queue[Any]] = {}
        self.cached: dict[int, int] = {}
        self.work = asyncio.Event()

    def load(self, name: str, folder: Path) -> str | None:
        """Load an adapter; the result says why it could not be loaded."""
        free = set(range(1, SLOTS + 1)) - set(self.slots.values()) - {slot for slot, n in self.users.items() if n}
        slot = min(free)
        answer = self.worker.obey(LoadPolicy(slot, slot, folder))
        while not isinstance(answer, PolicyLoaded):
            answer = self.worker.load_on()
        if answer.error is None:
            self.slots[name] = slot
        return answer.error

    def replace_weights(self, folder: Path) -> str | None:
        """Replace all weights; the result says why they could not be replaced."""
        try:
            for _ in fill(self.decoder, open_model(folder, self.decoder, torch.float32)):
                pass
        except BadPolicy as error:
            return str(error)
        return None

    def empty_cache(self) -> None:
        self.cache_age += 1

    def slot(self, name: str | None, base: str | None) -> int:
        if name == base:
            return 0
        if name not in self.slots:
            raise NoSuchModel(name)
        return self.slots[name]

    async def sample(self, request: SampleRequest, slot: int) -> AsyncIterator[tuple[list[SampledToken], int]]:
        """The tokens with the number of cached prompt tokens. Ending the iteration stops the request."""
        id, done = next(self.ids), False
        queue = self.answers[id] = asyncio.Queue()
        self.users[slot] += 1
        if request.constraint is not None:
            await asyncio.wrap_future(self.worker.compiler.future(request.constraint))
        self.worker.obey(Add(id, request, slot + self.cache_age * (SLOTS + 1), slot))
        self.work.set()
        try:
            while not done:
                tokens = await queue.get()
                done = tokens[-1].finish is not None
                yield tokens, self.cached.get(id, 0)
        finally:
            self.users[slot] -= 1
            del self.answers[id]
            if not done:
                self.worker.obey(Cancel(id))

    async def score(self, request: ScoreRequest, slot: int) -> Scores:
        id = next(self.ids)
        queue = self.answers[id] = asyncio.Queue()
        self.worker.obey(Score(id, request, slot))
        self.work.set()
        try:
            scores: Scores = await queue.get()
            return scores
        finally:
            del self.answers[id]

    async def run(self) -> None:
        """Sample, as long as there is something to do."""
        while True:
            await self.work.wait()
            if self.worker.scheduler.idle:
                self.work.clear()
                continue
            self._hand_out(self.worker.step())
            await asyncio.sleep(0.001)

    def _hand_out(self, report: Tokens) -> None:
        self.cached |= report.cached
        for id, answer in (*report.tokens.items(), *report.scores.items()):
            if id in self.answers:
                self.answers[id].put_nowait(answer)


def new_app(model: Any) -> FastAPI:
    """An application during whose life the model samples."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(model.run())
        yield
        running.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


def serve(app: Any, options: argparse.Namespace) -> None:
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")

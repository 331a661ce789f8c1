"""The application under a real HTTP server, with the tiny model in a worker process."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from openclaw_rl.api.app import create_app
from openclaw_rl.api.completion import TokenSettings
from openclaw_rl.api.service import ChatService
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatRenderer
from support.harness import MODEL, wait_for
from support.rank_processes import FastLauncher

#: Sequences that are sampled at the same time, and policies beside the base model.
MAX_SEQUENCES, POLICIES = 8, 2


class LocalBench:
    """An application that is served on a port of its own, in a thread of its own."""

    def __init__(self, model: Path, run: Path) -> None:
        options = WorkerOptions(model, "cpu", "float32", MAX_SEQUENCES, None, 0.05, POLICIES, 4)
        self.sampler = LocalSampler(options, max_queue=32, launcher=FastLauncher())
        self.renderer = ChatRenderer(model)
        self.ledger = Ledger(run)
        self.run_dir, self.url = run, ""
        self._stop = False

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=120)

    async def _serve(self) -> None:
        await self.sampler.start()
        service = ChatService(self.sampler, self.renderer, TokenSettings(), ledger=self.ledger)
        app = create_app(service, MODEL)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve())
        while not self._stop:
            if server.started and not self.url:
                self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            await asyncio.sleep(0.02)
        server.should_exit = True
        await serving
        await self.sampler.close()

    def run(self) -> None:
        asyncio.run(self._serve())

    def stop(self) -> None:
        self._stop = True


@contextlib.contextmanager
def serving_local(model: Path, run: Path) -> Iterator[LocalBench]:
    bench = LocalBench(model, run)
    thread = threading.Thread(target=bench.run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: bench.url != "" or not thread.is_alive(), seconds=120)
        assert bench.url
        yield bench
    finally:
        bench.stop()
        thread.join(30)
        bench.ledger.close()

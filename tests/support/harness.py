"""The application under a real HTTP server, with a scripted model."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import uvicorn

from openclaw_rl.api.app import create_app
from openclaw_rl.api.completion import SamplingDefaults, TokenSettings
from openclaw_rl.api.service import ChatService
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SampleRequest
from support.fakes import ScriptedSampler

MODEL = "tiny"
DEFAULTS = SamplingDefaults(temperature=0.6, top_k=9)
#: The longest wait before a test fails; generous, because what is waited for may be the start of a process.
SECONDS = 300


class Bench:
    """An application whose model always answers `says`."""

    def __init__(
        self,
        folder: Path,
        ledger: Ledger | None = None,
        defaults: SamplingDefaults = DEFAULTS,
        notes: NotesOptions | None = None,
        **app: Any,
    ) -> None:
        self.renderer = ChatRenderer(folder)
        self.says = "hello world"
        self.sampler = ScriptedSampler(self.script)
        self.service = ChatService(self.sampler, self.renderer, TokenSettings(defaults), ledger=ledger, notes=notes)
        self.app = create_app(self.service, MODEL, aliases=["owner/tiny"], **app)
        self.url = ""

    def script(self, request: SampleRequest, index: int) -> list[int]:
        end = self.renderer.tokenizer.backend.token_to_id("<|im_end|>")
        text = self.says.replace("{index}", str(index))
        return [*self.renderer.tokenizer.backend.encode(text).ids, end]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    def post(self, body: object, **headers: str) -> httpx.Response:
        return self.send("chat/completions", body, **headers)

    def send(self, path: str, body: object, **headers: str) -> httpx.Response:
        """Post to a path below /v1."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.url}/v1/{path}", content=content, headers=headers)

    def shown(self) -> str:
        """What the model was shown last, as text with control tokens."""
        ids = list(self.sampler.requests[-1].prompt_ids)
        return self.renderer.tokenizer.backend.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def running(bench: Bench, **settings: Any) -> Iterator[Bench]:
    server = uvicorn.Server(uvicorn.Config(bench.app, port=0, log_level="error", lifespan="off", **settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    bench.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield bench
    server.should_exit = True
    thread.join()


def openai_error(response: httpx.Response) -> dict[str, Any]:
    """The error in an answer. Every error has OpenAI's shape."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait until the condition holds. It is asked ever less often: to ask may itself cost a request or a command."""
    end = time.monotonic() + seconds
    pause = 0.005
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} seconds in vain"
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)

"""A server with the live page, whose model is scripted, and a visitor of its page."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.api.options import ApiKey
from openclaw_rl.dashboard.live.dashboard import LiveRun
from openclaw_rl.dashboard.live.routes import install
from openclaw_rl.learn.checkpoints import Checkpoints
from support.harness import running
from support.methods import a_method
from support.page_assertions import Seen, read_page
from support.recording import Recording

ALICE, BOB = ApiKey("alice", "alice-secret"), ApiKey("bob", "bob-secret")


class LivePage(Recording):
    """A server that records and has a page. Its first key may operate it."""

    def __init__(self, model: Path, folder: Path, keys: Sequence[ApiKey] = (), **app: Any) -> None:
        super().__init__(model, folder, keys=keys, **app)
        self.folder = folder
        run = LiveRun(a_method("combine"), folder, Checkpoints(folder / "checkpoints", 3))
        self.dashboard = install(self.app, run)

    @contextlib.contextmanager
    def visitor(self, key: ApiKey | None = None) -> Iterator["Visitor"]:
        with httpx.Client(base_url=self.url) as http:
            visitor = Visitor(http)
            if key is not None:
                assert visitor.log_in(key.secret).status_code == 303
            yield visitor


class Visitor:
    """Somebody with a browser, without scripts."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def log_in(self, secret: str, **fields: str) -> httpx.Response:
        return self.http.post("/dashboard/login", data={"key": secret, **fields})

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(f"/dashboard/{path}", headers=headers)

    def see(self, path: str) -> Seen:
        answer = self.get(path)
        assert answer.status_code == 200, answer.text
        return read_page(answer.text)

    @property
    def token(self) -> str:
        found = re.search(r'data-token="(\w+)"', self.get("").text)
        assert found
        return found[1]

    def do(
        self, action: str, token: str | None = None, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Send a form, as a script would."""
        data = {"token": self.token if token is None else token, **{name: str(value) for name, value in fields.items()}}
        return self.http.post(f"/dashboard/{action}", data=data, headers={"X-Part": "main", **(headers or {})})


@contextlib.contextmanager
def live_page(model: Path, folder: Path, keys: Sequence[ApiKey] = (), **app: Any) -> Iterator[LivePage]:
    page = LivePage(model, folder, keys, **app)
    with running(page) as server:
        assert isinstance(server, LivePage)
        yield server
        server.dashboard.close()
    page.db.close()
    page.ledger.close()

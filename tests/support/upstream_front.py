"""A server of ours in front of an API, in this process."""

from pathlib import Path

from openclaw_rl.api.app import create_app
from openclaw_rl.api.completion import TokenSettings
from openclaw_rl.api.service import ChatService
from openclaw_rl.engines.upstream.sampler import UpstreamSampler, UpstreamSettings
from openclaw_rl.ledger import turns
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import MessageRenderer
from openclaw_rl.types import StoredTurn
from support.harness import Bench


class Front(Bench):
    """The server, its sampler and what it records."""

    def __init__(self, urls: list[str], directory: Path, *, model: str = "their-model", key: str = "") -> None:
        self.ledger = Ledger(directory)
        self.db = connect(directory / FILE, readonly=True)
        self.sampler = UpstreamSampler(UpstreamSettings(urls, model, key, 30, None, 4, 60))
        renderer = MessageRenderer()
        self.service = ChatService(
            self.sampler, renderer, TokenSettings(), ledger=self.ledger, notes=NotesOptions(note_probes=0)
        )
        self.app = create_app(self.service, "tiny")
        self.url = ""

    def turns(self) -> list[StoredTurn]:
        return [turns.load_turn(self.db, number) for number in turns.turn_numbers(self.db)]

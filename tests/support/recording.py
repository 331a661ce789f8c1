"""A server that captures what its scripted model answers."""

import sqlite3
from pathlib import Path

from openclaw_rl.api.options import ApiKey
from openclaw_rl.ledger import turns
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.types import SampleRequest, State, StoredTurn
from support.harness import Bench

#: Two people's keys for a server, and what each sends with a request.
KEYS = tuple(ApiKey(name, f"sk-{name}") for name in ("sam", "kim"))
HEADERS = {key.name: {"Authorization": f"Bearer {key.secret}"} for key in KEYS}


class Recording(Bench):
    """A server that captures, whose model spells: one token a byte, as no tokenizer would."""

    def __init__(self, folder: Path, directory: Path, **app: object) -> None:
        self.ledger = Ledger(directory)
        self.db = connect(directory / FILE, readonly=True)
        super().__init__(folder, self.ledger, **app)

    def script(self, request: SampleRequest, index: int) -> list[int]:
        backend = self.renderer.tokenizer.backend
        text = self.says.replace("{index}", str(index))
        ids = [id for character in text for id in backend.encode(character).ids]
        return [*ids, backend.token_to_id("<|im_end|>")]

    def say(self, answer: str, messages: list[dict], headers: dict | None = None, **body: object) -> dict:
        """Send a request that the model answers with `answer`; the assistant message the client gets."""
        self.says = answer
        response = self.post({"messages": messages, **body}, **(headers or {}))
        assert response.status_code == 200, response.text
        self.last_id = response.json()["id"]
        return response.json()["choices"][0]["message"]

    def turns(self) -> list[StoredTurn]:
        return [turns.load_turn(self.db, number) for number in turns.turn_numbers(self.db)]

    def states(self) -> list[State]:
        return [turn.state for turn in self.turns()]

    def empty(self) -> None:
        """Forget everything, so that tests can share a server."""
        with sqlite3.connect(self.db.execute("PRAGMA database_list").fetchone()["file"]) as db:
            # The first row of the changes belongs to an empty ledger.
            tables = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name != 'changes'"
            for (table,) in db.execute(tables).fetchall():
                db.execute(f"DELETE FROM {table}")
        db.close()
        self.ledger._sequences.__init__(1 << 20)
        self.sampler.__init__(self.script)  # type: ignore[misc]

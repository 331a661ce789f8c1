"""What every route needs of the server it belongs to."""

import time
from dataclasses import dataclass, field

from fastapi import Request

from openclaw_rl.api.auth import KeyCheck
from openclaw_rl.api.body import BodyReader
from openclaw_rl.api.encode import Encoder
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.operations import Operations
from openclaw_rl.api.service import ChatService
from openclaw_rl.ledger.ledger import Ledger


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts of one server. It does not change while the server runs."""

    service: ChatService
    encoder: Encoder
    keys: KeyCheck
    operations: Operations
    model: str
    aliases: frozenset[str]
    bodies: BodyReader
    started: int = field(default_factory=lambda: int(time.time()))
    """In seconds since 1970; clients see it as the time when the model was created."""

    def check_model(self, name: str) -> None:
        """Raises 404 unless `name` is one of the names of the served model."""
        if name != self.model and name not in self.aliases:
            message = f"The model {name!r} does not exist; this server has {self.model!r}."
            raise ApiError(404, message, code="model_not_found", param="model")

    def ledger(self) -> Ledger:
        """The ledger that turns are captured in; raises 404 on a server that captures none."""
        if self.service.capture is None:
            raise ApiError(404, "This server does not capture turns (--no-capture).", code="capture_off")
        return self.service.capture.ledger


def server_of(request: Request) -> ServerState:
    """The server that a request came to."""
    state: ServerState = request.app.state.server
    return state

"""What every route needs of the server it belongs to, and what it asks of judging and learning."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fastapi import Request

from openclaw_rl.api.auth import KeyCheck
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.reader import BodyReader
from openclaw_rl.api.service import ChatService
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.types import Claim, NextStep

#: Whether the client of a request has disconnected.
IsGone = Callable[[], Awaitable[bool]]
#: Why a server hands out no turns.
NO_TRAINER = "This server has no outside trainer, so no turns can be claimed: start it with --learner outside."


class OperationFailed(Exception):
    """The operation cannot be done; the message says why."""


class Operations:
    """Judging and learning, as routes see them: the API imports neither. A server that does neither has this class."""

    def judge(self) -> str:
        """Whether turns are judged: on, off, or suspended and why."""
        return "off"

    def learner(self) -> str:
        """What the next training step waits for, in words."""
        return "off"

    def where_learner_runs(self) -> str:
        """Where and how the learner runs, in words; empty if there is none."""
        return ""

    def where_judge_runs(self) -> str:
        """Where and how the model that judges and teaches runs, in words; empty if there is no such model."""
        return ""

    def next_step(self) -> NextStep | None:
        """How far the next training step is; None if there will be none."""
        return None

    async def topic_of(self, note: str) -> str:
        """What a note is about; empty if nobody can say."""
        return ""

    async def roll_back(self, version: int | None, *, retrain: bool = False) -> int:
        """Serve an earlier policy from now on; returns its new version. Raises OperationFailed.

        With `retrain`, it is the newest that was not trained on deleted turns, and later ones are trained anew.
        """
        raise OperationFailed("This server does not learn, so there is nothing to roll back.")

    async def hold(self, version: int) -> int:
        """Load the checkpoint of a policy version for those who name it; under which version. Raises OperationFailed.

        The policy that serves goes on serving.
        """
        raise OperationFailed("This server does not learn, so it has no checkpoints.")

    async def claim(
        self, count: int | None, lease_seconds: float | None, wait_seconds: float, is_gone: IsGone
    ) -> Claim:
        """Lease judged turns to an outside trainer, waiting a while for them. Raises OperationFailed.

        A trainer that is gone meanwhile gets none.
        """
        raise OperationFailed(NO_TRAINER)

    async def confirm(self, lease: str) -> int:
        """Record that leased turns were trained on; the step. Raises UnknownLease, LeaseRefused, OperationFailed."""
        raise OperationFailed(NO_TRAINER)


@dataclass(frozen=True, slots=True)
class ServerState:
    """The parts of one server. It does not change while the server runs."""

    service: ChatService
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

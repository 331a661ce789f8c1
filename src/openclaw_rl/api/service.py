"""What every route needs of its server: running completions, and what it asks of judging and learning."""

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import Request
from tokenizers import Tokenizer

from openclaw_rl.api.auth import KeyCheck
from openclaw_rl.api.capture.capture import Capture
from openclaw_rl.api.capture.note_giver import NoteGiver
from openclaw_rl.api.capture.turn import OpenTurn
from openclaw_rl.api.completion import Completion, TokenAnswers, TokenSettings
from openclaw_rl.api.errors import ApiError, from_engine
from openclaw_rl.api.reader import BodyReader, IncomingRequest, RawRequest, RequestReader
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.text_answers import TextAnswers
from openclaw_rl.api.wire import Body, parse
from openclaw_rl.engines.base import EngineUnavailable, QueueFull, Sampler, TextSampler, VersionGone
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatRenderer, RenderedPrompt, Renderer
from openclaw_rl.types import SHARED, Claim, LineState, NextStep


class ChatService:
    """Answers chat requests with one model.

    - A request that cannot be answered is refused with an `ApiError` before anything is sampled.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        settings: TokenSettings,
        *,
        ledger: Ledger | None = None,
        notes: NotesOptions | None = None,
    ) -> None:
        """Without `notes`, no request gets notes."""
        self.sampler = sampler
        self.renderer = renderer
        self.metrics = ServerMetrics(sampler.stats)
        self._answers: TokenAnswers | TextAnswers
        if isinstance(renderer, ChatRenderer):
            self._answers = TokenAnswers(sampler, renderer, self.metrics, settings)
        else:
            assert isinstance(sampler, TextSampler)
            self._answers = TextAnswers(sampler, self.metrics)
        self.reader = RequestReader(renderer, sampler, self._answers.rules)
        self.uses_notes = ledger is not None and notes is not None and notes.notes
        giver = NoteGiver(ledger, renderer, notes, settings.seed) if ledger and notes and notes.notes else None
        self.capture = Capture(ledger, renderer, self.metrics, giver) if ledger else None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None if the model's tokens are elsewhere."""
        return self.renderer.tokenizer.backend if isinstance(self.renderer, ChatRenderer) else None

    async def begin(
        self, raw: RawRequest, id_prefix: Callable[[], str], version: int | None = None
    ) -> tuple[IncomingRequest, Completion]:
        """Read a request and give it to the sampler. Raises ApiError.

        The completion's id begins with what `id_prefix` says once the request has been parsed.
        With `version`, that policy answers; it raises VersionGone if the sampler does not hold it.
        """
        incoming, prompt, turn = await self.reader.read(raw, self._open, in_thread=self.capture is not None)
        try:
            if (incoming.request.n or 1) > self.sampler.limits.max_choices:
                most = self.sampler.limits.max_choices
                raise ApiError(400, f"n must be at most {most} on this server.", param="n")
            if raw.ready_line is not None and (line := await raw.ready_line()) != incoming.line:
                incoming = replace(incoming, line=line)
            return incoming, self._answers.start(incoming, prompt, turn, id_prefix(), version)
        except (QueueFull, EngineUnavailable, ApiError) as error:
            if turn is not None:
                turn.close()
            if isinstance(error, ApiError) or (version is not None and isinstance(error, VersionGone)):
                raise
            raise from_engine(error) from error

    def _open(self, incoming: IncomingRequest) -> tuple[IncomingRequest, RenderedPrompt, OpenTurn | None]:
        """The request, its prompt, and the turn that it becomes."""
        return incoming, *(self.capture.open(incoming) if self.capture else (incoming.prompt, None))

    async def count(self, raw: RawRequest) -> int:
        """How many tokens the model would be given for a request. Nothing is sampled or recorded. Raises ApiError."""
        return await self.reader.read(raw, self._count, in_thread=self.capture is not None)

    def _count(self, incoming: IncomingRequest) -> int:
        return (self.capture.prompt(incoming) if self.capture else incoming.prompt).length

    def capture_status(self) -> str:
        """Whether turns are recorded: on, off, or suspended and why."""
        if self.capture is None:
            return "off"
        reason = self.capture.ledger.suspended
        return "on" if reason is None else f"suspended: {reason}"


#: Whether the client of a request has disconnected.
IsGone = Callable[[], Awaitable[bool]]
#: Why a server hands out no turns.
NO_TRAINER = "This server has no outside trainer, so no turns can be claimed: start it with --learner outside."


class OperationFailed(Exception):
    """The operation cannot be done; the message says why."""


class Operations:
    """Judging and learning, as routes see them: the API imports neither. A server that does neither has this class."""

    has_lines = False
    """Whether people have lines of policies of their own."""

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

    def guard(self) -> dict[str, Any] | None:
        """What the guard of answers found last; None if there is none, or if it has not examined anything."""
        return None

    def line_of(self, owner: str) -> str:
        """The line that answers an owner's requests which name none."""
        return owner if self.has_lines else SHARED

    def line_names(self) -> list[str]:
        """All lines with policies, the shared one first."""
        return [SHARED]

    async def serve_line(self, line: str) -> None:
        """Make sure that the sampler knows the policy of a line, if it has one. Raises OperationFailed."""

    def line_states(self) -> list[LineState]:
        """Where each line stands; empty if there is only the shared one."""
        return []

    async def drop_line(self, line: str) -> bool:
        """Delete a person's line for good; whether this server learns in one. Raises OperationFailed."""
        return False

    async def merge(self, folder: Path, is_gone: IsGone) -> int:
        """Let the shared line continue from an average of lines; under which version. Raises OperationFailed.

        Nothing changes for a client that is gone when the average has been examined.
        """
        raise OperationFailed("This server learns in no lines of policies (--policy-per-user), so it merges none.")

    async def relearn(self, line: str = SHARED) -> int:
        """Let the turns that the guard set aside be trained on all the same; how many. Raises OperationFailed."""
        raise OperationFailed("This server does not learn, so there is nothing to learn from.")

    async def topic_of(self, note: str) -> str:
        """What a note is about; empty if nobody can say."""
        return ""

    def why_no_practice(self) -> str:
        """Why notes cannot be practised; empty if they can."""
        return "This server does not learn, so it practises no notes."

    async def roll_back(self, version: int | None, *, retrain: bool = False, line: str = SHARED) -> int:
        """Serve an earlier policy of a line from now on; returns its new version. Raises OperationFailed.

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

    def line_for(self, owner: str, name: str | None) -> str:
        """The line that answers an owner's request for a model: their own, or the one after a colon in its name.

        Raises 404 unless `name` names the served model, and a line that the owner may use.
        """
        if name is None or name == self.model or name in self.aliases:
            return self.operations.line_of(owner)
        model, _, line = name.rpartition(":")
        if model in (self.model, *self.aliases) and line in self.lines_for(owner):
            return line
        message = f"The model {name!r} does not exist; this server has {self.model!r}."
        raise ApiError(404, message, code="model_not_found", param="model")

    def lines_for(self, owner: str) -> list[str]:
        """The lines that an owner may name: the shared one and their own, or all; none if there are no lines."""
        operations = self.operations
        if not operations.has_lines:
            return []
        if self.keys.may_operate(owner):
            return list(dict.fromkeys([*operations.line_names(), operations.line_of(owner)]))
        return [SHARED, operations.line_of(owner)]

    def ledger(self) -> Ledger:
        """The ledger that turns are captured in; raises 404 on a server that captures none."""
        if self.service.capture is None:
            raise ApiError(404, "This server does not capture turns (--no-capture).", code="capture_off")
        return self.service.capture.ledger


@contextlib.contextmanager
def refusals_of_operation(code: str, param: str | None = None) -> Iterator[None]:
    """Turn an operation that cannot be done into a 409."""
    try:
        yield
    except OperationFailed as error:
        raise ApiError(409, str(error), code=code, param=param) from error


async def body_of(request: Request, model: type[Body], *, may_be_empty: bool = False) -> Body:
    """The fields in the body of a request that is not a chat. Raises ApiError."""
    async with server_of(request).bodies.read(request) as content:
        return parse(model, content or (b"{}" if may_be_empty else b""))


def server_of(request: Request) -> ServerState:
    """The server that a request came to."""
    state: ServerState = request.app.state.server
    return state

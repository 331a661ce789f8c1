"""What every route needs of its server: running completions, and what it asks of judging and learning."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from fastapi import Request

from openclaw_rl.api.auth import KeyCheck
from openclaw_rl.api.capture.capture import Capture
from openclaw_rl.api.capture.note_giver import NoteGiver
from openclaw_rl.api.capture.turn import Choice, OpenTurn
from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError, from_engine
from openclaw_rl.api.reader import AnswerRules, BodyReader, IncomingRequest, RequestReader, context_length_exceeded
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import ChatRequest, TextRequest
from openclaw_rl.engines.base import EngineUnavailable, QueueFull, Sampler, VersionGone
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.call_format import call_format
from openclaw_rl.rendering.chat import ChatRenderer, RenderedPrompt
from openclaw_rl.rendering.response import ResponseParser
from openclaw_rl.rendering.tokenizer import read_json
from openclaw_rl.rendering.tool_calls import PARSERS, choose_parser
from openclaw_rl.types import Claim, NextStep, SampleRequest, SamplingParams, TurnKind

log = logging.getLogger(__name__)

#: Larger values of top_k mean the same, and would overflow a 32-bit integer.
MAX_TOP_K = 2**31 - 1
#: Sampling parameters by their name in a generation config.
GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for what a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    stops_loops: bool = False
    """Whether an answer without a limit and a format ends when it repeats itself."""

    def for_model(self, folder: Path) -> "SamplingDefaults":
        """The values of the model's generation config; for those that it does not name, these."""
        config = read_json(folder / "generation_config.json")
        for key in ("repetition_penalty", "min_p"):
            if config.get(key) not in (None, 0, 1):
                log.warning("The model's generation config asks for %s, which is not supported.", key)
        values = {name: config[key] for key, name in GENERATION_CONFIG_FIELDS.items() if config.get(key) is not None}
        return replace(self, **values)


class ChatService:
    """Answers chat requests with one model.

    - A request that cannot be answered is refused with an `ApiError` before anything is sampled.
    - A request without a seed gets one that follows from the server's seed and the number of the request.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        defaults: SamplingDefaults,
        *,
        tool_parser: str = "auto",
        seed: int = 0,
        ledger: Ledger | None = None,
        recorded_top: int = 0,
        notes: NotesOptions | None = None,
    ) -> None:
        """`recorded_top`: how many of the likeliest tokens are recorded with each token of a main turn.

        Without `notes`, no request gets notes.
        """
        self.sampler = sampler
        self.renderer = renderer
        self.defaults = defaults
        self._parser = choose_parser(renderer.template.text) if tool_parser == "auto" else tool_parser
        thinks = "<think>" in renderer.template.text
        self.rules = AnswerRules(call_format(renderer, self._parser), thinks, sampler.capabilities.constrains)
        self.reader = RequestReader(renderer, sampler, self.rules)
        self.recorded_top = recorded_top
        self.metrics = ServerMetrics(sampler.stats)
        self.uses_notes = ledger is not None and notes is not None and notes.notes
        giver = NoteGiver(ledger, renderer, notes, seed) if ledger and notes and notes.notes else None
        self.capture = Capture(ledger, renderer, self.metrics, giver) if ledger else None
        self._capturing = ThreadPoolExecutor(1, thread_name_prefix="capture")
        self._seeds = (request_seed(seed, number) for number in count())

    async def begin(self, incoming: IncomingRequest, id_prefix: str, version: int | None = None) -> Completion:
        """Give a request to the sampler. Raises ApiError. The completion's id begins with `id_prefix`.

        With `version`, that policy answers; it raises VersionGone if the sampler does not hold it.
        """
        prompt, turn = await self._open_turn(incoming)
        try:
            return self._start(incoming, prompt, turn, id_prefix, version)
        except (QueueFull, EngineUnavailable, ApiError) as error:
            if turn is not None:
                turn.close()
            if isinstance(error, ApiError) or (version is not None and isinstance(error, VersionGone)):
                raise
            raise from_engine(error) from error

    async def count(self, incoming: IncomingRequest) -> int:
        """How many tokens the model would be given for a request. Nothing is sampled or recorded."""
        if self.capture is None:
            return len(incoming.prompt.ids)
        prompt = await asyncio.get_running_loop().run_in_executor(self._capturing, self.capture.prompt, incoming)
        return len(prompt.ids)

    async def _open_turn(self, incoming: IncomingRequest) -> tuple[RenderedPrompt, OpenTurn | None]:
        if self.capture is None:
            return incoming.prompt, None
        # A long history takes a while to compare with the record. One thread for all requests: they are taken in turn.
        return await asyncio.get_running_loop().run_in_executor(self._capturing, self.capture.open, incoming)

    def _start(
        self,
        incoming: IncomingRequest,
        prompt: RenderedPrompt,
        turn: OpenTurn | None,
        id_prefix: str,
        version: int | None,
    ) -> Completion:
        request = incoming.request
        constraint = incoming.constraint and self.rules.for_prompt(incoming.constraint, prompt)
        recorded_top = self.recorded_top if turn and turn.kind is TurnKind.MAIN else 0
        params = self._params(request, len(prompt.ids), recorded_top)
        n = request.n or 1
        if n > self.sampler.limits.max_choices:
            raise ApiError(400, f"n must be at most {self.sampler.limits.max_choices} on this server.", param="n")
        sampled = SampleRequest(prompt.ids, params, n, version=version, owner=incoming.owner, constraint=constraint)
        stream = self.sampler.sample(sampled)
        choices = [Choice(self._response_parser(request, prompt)) for _ in range(n)]
        bounded = request.max_completion_tokens or request.max_tokens or constraint
        stops_loops = self.defaults.stops_loops and not bounded
        return Completion(
            prompt, params, stream, choices, self.metrics, turn, incoming.arrived, id_prefix, stops_loops=stops_loops
        )

    def capture_status(self) -> str:
        """Whether turns are recorded: on, off, or suspended and why."""
        if self.capture is None:
            return "off"
        reason = self.capture.ledger.suspended
        return "on" if reason is None else f"suspended: {reason}"

    def _params(self, request: ChatRequest, prompt_tokens: int, recorded_top: int) -> SamplingParams:
        limit = self.sampler.limits.max_context_tokens
        room = limit - prompt_tokens
        if room < 1:
            raise context_length_exceeded(prompt_tokens, limit)
        defaults = self.defaults
        max_tokens = request.max_completion_tokens or request.max_tokens or defaults.max_tokens or room
        return SamplingParams(
            max_tokens=min(max_tokens, room),
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=min(MAX_TOP_K, max(0, defaults.top_k if request.top_k is None else request.top_k)),
            seed=next(self._seeds) if request.seed is None else request.seed,
            stop_token_ids=self.renderer.tokenizer.eos_ids,
            top_logprobs=max(request.top_logprobs or 0, recorded_top),
        )

    def _response_parser(self, request: ChatRequest, prompt: RenderedPrompt) -> ResponseParser:
        parser = PARSERS[self._parser]() if request.offered_tools else None
        if isinstance(request, TextRequest):
            return ResponseParser(self.renderer.detokenizer, request.stops, splits_reasoning=False)
        one_call = request.parallel_tool_calls is False
        return ResponseParser(
            self.renderer.detokenizer, request.stops, prompt.opens_reasoning, parser, one_call=one_call
        )


def request_seed(seed: int, number: int) -> int:
    """The seed of the server's n-th request. Servers with different seeds share none of them."""
    return (seed << 32) + number


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

    def guard(self) -> dict[str, Any] | None:
        """What the guard of answers found last; None if there is none, or if it has not examined anything."""
        return None

    async def relearn(self) -> int:
        """Let the turns that the guard set aside be trained on all the same; how many. Raises OperationFailed."""
        raise OperationFailed("This server does not learn, so there is nothing to learn from.")

    async def topic_of(self, note: str) -> str:
        """What a note is about; empty if nobody can say."""
        return ""

    def why_no_practice(self) -> str:
        """Why notes cannot be practised; empty if they can."""
        return "This server does not learn, so it practises no notes."

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

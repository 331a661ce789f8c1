"""Turns and sessions: as they are captured, and as the ledger holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from openclaw_rl.types.sampling import Likeliest, SamplingParams
from openclaw_rl.types.training import SampleKind
from openclaw_rl.types.verdicts import Feedback, Verdict


class TurnKind(StrEnum):
    """Whether a turn may be trained on."""

    MAIN = "main"
    SIDE = "side"


class Continuation(StrEnum):
    """How a turn's prompt goes on from the turn before it."""

    NEW = "new"
    """There is no turn before it."""
    EXTENDS = "extends"
    """The messages that the client sent render to exactly the recorded tokens, and then more."""
    REALIGNED = "realigned"
    """The client returned the history in another form; the recorded tokens were used instead."""
    FORKED = "forked"
    """The history truly differs, or the model's template rewrites it: the prompt was rendered anew."""


class SessionKey(NamedTuple):
    """A session's name, unique among the sessions of its owner (the name of an API key)."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy, token for token, with the request that led to it."""

    completion: str
    """The id that the client was given; turns of one request share it."""
    choice: int
    session: SessionKey
    kind: TurnKind
    kind_reason: str
    """Why it is main or side, in words."""
    version: int
    messages: Sequence[Mapping[str, Any]]
    """As received, the tools first (role `tools`) where there were any."""
    message: Mapping[str, Any]
    """The assistant message as the client was given it."""
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the raw distribution: temperature 1, nothing cut off. Empty for imported turns."""
    sampling: SamplingParams
    finish_reason: str
    continuation: Continuation
    parent: int | None
    """The turn that this one continues, by its number in the ledger."""
    request_key: bytes
    """Equal for requests with the same content in whatever form: a retry has the key of the original."""
    end_key: bytes
    """The same for the conversation with this response: it finds the request that continues it."""
    top: Likeliest | None = None


class State(StrEnum):
    """Where a turn is on its way to being trained on."""

    CAPTURED = "captured"
    """Recorded, but something is missing before it can wait for a next state: an import's log-probs."""
    AWAITING = "awaiting_next_state"
    READY = "ready"
    """Its next state is known: the turn can be judged."""
    JUDGED = "judged"
    BATCHED = "batched"
    APPLIED = "applied"
    DROPPED = "dropped"
    """Will not be trained on, for a recorded reason."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn as it is in the ledger, with what came of it."""

    number: int
    session: SessionKey
    completion: str
    choice: int
    kind: TurnKind
    kind_reason: str
    state: State
    reason: str
    created: float
    version: int
    continuation: str
    messages: list[dict[str, Any]]
    message: dict[str, Any]
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    top: Likeliest | None
    sampling: dict[str, Any]
    finish_reason: str
    next_state: list[dict[str, Any]] | None
    ready_at: float | None
    """When its next state was known."""
    feedback: list[Feedback]
    verdict: Verdict | None
    sample: SampleKind | None
    """What it is trained on, once it is judged."""


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A session in short."""

    key: SessionKey
    number: int
    source: str
    created: float
    last: float
    """When its last request came."""
    closed: bool
    turns: int
    main: int
    ready: int
    """Turns that have a next state."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many turns are in each state, and the last step that counts."""

    states: dict[State, int]
    dropped: dict[str, int]
    """By reason."""
    step: int
    version: int

    @property
    def total(self) -> int:
        return sum(self.states.values())

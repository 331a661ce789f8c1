"""Turns and sessions: as they are captured, and as the ledger holds them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from openclaw_rl.types.episodes import EpisodeSummary, TurnEpisode
from openclaw_rl.types.notes import ConversationNote
from openclaw_rl.types.sampling import SHARED, SamplingParams, TopTokens
from openclaw_rl.types.training import SampleKind
from openclaw_rl.types.verdicts import Feedback, Verdict


class TurnKind(StrEnum):
    """Whether a turn may be trained on."""

    MAIN = "main"
    SIDE = "side"


class Continuation(StrEnum):
    """How a turn's prompt continues the turn before it."""

    NEW = "new"
    """There is no turn before it."""
    EXTENDS = "extends"
    """The client's messages render to exactly the recorded tokens, followed by new ones."""
    REALIGNED = "realigned"
    """The client sent the history back in another form; the recorded tokens were used instead."""
    FORKED = "forked"
    """The history differs, or the model's template rewrites it: the whole prompt was rendered again."""


class SessionKey(NamedTuple):
    """A session's id and its owner (the name of an API key). Ids are unique per owner."""

    owner: str
    id: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy, token for token, and the request for it."""

    completion: str
    """The completion's id in the API. Turns of one request share it."""
    choice: int
    session: SessionKey
    kind: TurnKind
    kind_reason: str
    """Why it is main or side, in words."""
    version: int
    messages: Sequence[Mapping[str, Any]]
    """As received. If there were tools, they are the first message (role `tools`)."""
    message: Mapping[str, Any]
    """The assistant message that the client received."""
    prompt_ids: list[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the raw distribution: temperature 1, no truncation. Empty for imported turns."""
    sampling: SamplingParams
    finish_reason: str
    continuation: Continuation
    parent: int | None
    """The turn that this one continues, by its number in the ledger."""
    request_key: bytes
    """Equal for requests with the same content, also in another form: a retry has the key of the original."""
    end_key: bytes
    """The same key for the conversation including this response. It identifies the request that continues it."""
    top: TopTokens | None = None
    forced: Sequence[bool] = ()
    """Which response tokens a constraint forced; empty if none."""
    notes: Sequence[ConversationNote] = ()
    """The notes of the conversation that begins with this turn; empty if it continues another or has none."""
    notes_from: int | None = None
    """The turn with which the conversation and its notes began; None if it begins here or has no notes."""
    plain_ids: Sequence[int] | None = None
    """The prompt without notes, if the prompt has notes."""
    created: float | None = None
    """When the answer began; None: when the turn is recorded."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the API needs, beyond the message, to give the answer again as it was given."""


class State(StrEnum):
    """Where a turn is on its way to being trained on."""

    CAPTURED = "captured"
    """Recorded, but not complete: an imported turn still needs its log-probs."""
    AWAITING = "awaiting_next_state"
    """Its next state is awaited; in an episode, the reward."""
    READY = "ready"
    """Its next state is known: the turn can be judged."""
    JUDGED = "judged"
    BATCHED = "batched"
    APPLIED = "applied"
    DROPPED = "dropped"
    """Will not be trained on; the reason is recorded."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn as the ledger holds it, with its state and its verdict."""

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
    top: TopTokens | None
    sampling: dict[str, Any]
    finish_reason: str
    next_state: list[dict[str, Any]] | None
    ready_at: float | None
    """When its next state became known."""
    feedback: list[Feedback]
    verdict: Verdict | None
    sample: SampleKind | None
    """Which signals it trains on, once it is judged."""
    episode: TurnEpisode | None = None
    """The episode of its session, if the session is one."""
    forced: list[bool] = field(default_factory=list)
    """Which response tokens a constraint forced, so that they teach nothing; empty if none."""
    notes: list[ConversationNote] = field(default_factory=list)
    """The notes of its conversation, those that were withheld among them."""
    plain_ids: list[int] | None = None
    """Its prompt without notes; None if no note was in the prompt."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the API recorded about the answer beyond the message."""
    next_at: float | None = None
    """When its next state came; None if it has none, or if it was imported."""
    line: str = SHARED
    """The line of policies that answered."""

    @property
    def is_text(self) -> bool:
        """Whether it was recorded as text: another API answered, and nobody here knows the tokens."""
        return not self.prompt_ids


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A summary of a session."""

    key: SessionKey
    number: int
    source: str
    created: float
    last: float
    """When its last request arrived."""
    closed: bool
    turns: int
    main: int
    ready: int
    """Turns that have a next state."""
    episode: EpisodeSummary | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of turns in each state, and the last step that was not undone."""

    states: dict[State, int]
    dropped: dict[str, int]
    """By reason."""
    step: int
    version: int

    @property
    def total(self) -> int:
        return sum(self.states.values())

"""What pages show of a run, a bounded piece at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from openclaw_rl.types.episodes import EpisodeSummary, TurnEpisode
from openclaw_rl.types.notes import ConversationNote
from openclaw_rl.types.training import SampleKind, StepOutcome
from openclaw_rl.types.turns import SessionKey, State, TurnKind
from openclaw_rl.types.verdicts import Feedback, Sign, Verdict


class PagePlace(NamedTuple):
    """Where a page of sessions begins: after the session with this last activity and number."""

    last: float
    number: int


@dataclass(frozen=True, slots=True)
class SessionCard:
    """A session in a list."""

    number: int
    key: SessionKey
    created: float
    last: float
    """When its last request arrived."""
    closed: bool
    turns: int
    question: str
    """The beginning of the first message that a person or a tool sent."""
    version: int
    """The policy version of its last turn; 0 without a turn."""
    signs: tuple[Sign | None, ...]
    """The verdicts of its last turns, the newest last; None: not judged yet."""
    episode: EpisodeSummary | None = None


@dataclass(frozen=True, slots=True)
class TurnCard:
    """A turn in a conversation: what was new in its request, the answer, and what became of it. No tokens."""

    number: int
    session: int | None
    """None for a turn outside the live page."""
    completion: str
    choice: int
    kind: TurnKind
    kind_reason: str
    state: State
    reason: str
    created: float
    version: int
    tokens: int
    """Of the response."""
    asked: tuple[Mapping[str, Any], ...]
    """The messages since the last answer, the oldest first."""
    message: Mapping[str, Any]
    came_next: tuple[Mapping[str, Any], ...]
    feedback: tuple[Feedback, ...]
    verdict: Verdict | None
    sample: SampleKind | None
    episode: TurnEpisode | None = None
    notes: tuple[ConversationNote, ...] = ()
    """The notes of its conversation, those that were withheld among them."""
    update: int | None = None
    """The number of the last training step that used it."""
    practised: "PractisedFrom | None" = None


@dataclass(frozen=True, slots=True)
class PractisedFrom:
    """What an answer was made to practise."""

    note: int
    turn: int | None
    """The turn whose message it answers; None if the message came with the program."""
    session: int | None
    """That of the turn."""


@dataclass(frozen=True, slots=True)
class UpdateCard:
    """A training step in a list."""

    number: int
    step: int
    version: int | None
    outcome: StepOutcome
    reason: str
    created: float
    turns: int
    metrics: Mapping[str, Any]
    line: str


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """The turns of a training step, as far as one owner may see them."""

    cards: tuple[TurnCard, ...]
    others: int
    """Turns of other owners."""
    deleted: int
    parent: int | None
    """The policy version that the step started from."""


@dataclass(frozen=True, slots=True)
class GroupCard:
    """A group in a list, with its attempts."""

    number: int
    name: str
    size: int
    closed: bool
    settled: bool
    mean: float | None
    is_constant: bool
    attempts: tuple[SessionCard, ...]


@dataclass(frozen=True, slots=True)
class EpisodePoint:
    """The reward of one episode, for a chart."""

    session: int
    reward: float
    solved: bool | None


@dataclass(frozen=True, slots=True)
class PageChanges:
    """What changed for one owner after a cursor."""

    cursor: int
    complete: bool = True
    """False: too much changed to list. Read everything again."""
    sessions: tuple[int, ...] = ()
    """Sessions of the owner that changed, or of which a turn or a verdict did."""
    turns: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    practices: tuple[int, ...] = ()
    """Practices of the owner's notes."""
    deleted: bool = False
    """Whether something was deleted, by anybody."""

    def __bool__(self) -> bool:
        return not self.complete or self.deleted or bool(self.sessions or self.turns or self.updates or self.practices)

"""A turn as a piece of a conversation: what was asked and answered, what came next, and what was made of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.dashboard.views.tokens import TokenView
from openclaw_rl.dashboard.views.words import STATES, spoken
from openclaw_rl.ledger.episodes import describe_step
from openclaw_rl.ledger.states import ALREADY_USED
from openclaw_rl.types import (
    ConversationNote,
    Feedback,
    Question,
    SampleKind,
    Source,
    State,
    StoredTurn,
    TurnCard,
    TurnEpisode,
    TurnKind,
    Verdict,
    Vote,
)

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "tool": "tool", "developer": "system"}


@dataclass(frozen=True, slots=True)
class Utterance:
    """Something that somebody or something said."""

    who: str
    text: str

    @property
    def role(self) -> str:
        """A known role, for the style sheet."""
        return ROLES.get(self.who, "other")


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn, ready to be shown."""

    number: int
    version: int
    state: State
    reason: str
    """Why it is not trained on."""
    asked: tuple[Utterance, ...]
    answer: str
    came_next: tuple[Utterance, ...]
    feedback: tuple[Feedback, ...]
    verdict: Verdict | None
    sample: SampleKind | None
    title: str = ""
    session: int | None = None
    completion: str = ""
    choice: int = 0
    created: float = 0.0
    finish_reason: str = ""
    length: int = 0
    """Tokens of the answer."""
    is_side: bool = False
    can_rate: bool = False
    update: int | None = None
    episode_line: str = ""
    notes: tuple[ConversationNote, ...] = ()
    tokens: TokenView | None = None
    overlaps: Mapping[str, str] = field(default_factory=dict)
    """For each hint that was compared: what teacher and policy have in common under it."""

    @property
    def state_words(self) -> str:
        return STATES[self.state]

    @property
    def thumb(self) -> int:
        """The sign of the last explicit feedback; 0 without any."""
        scores = [given.score for given in self.feedback if given.source is Source.EXPLICIT]
        return 0 if not scores else 1 if scores[-1] > 0 else -1 if scores[-1] < 0 else 0

    @property
    def score_votes(self) -> tuple[Vote, ...]:
        return tuple(vote for vote in self.verdict.votes if vote.question is Question.SCORE) if self.verdict else ()


def from_card(card: TurnCard, *, with_next: bool = False) -> TurnView:
    """`with_next`: also the messages that followed, which the next turn of a conversation shows anyway."""
    return TurnView(
        number=card.number,
        version=card.version,
        state=card.state,
        reason=card.kind_reason if card.kind is TurnKind.SIDE else card.reason,
        asked=tuple(utterances(card.asked)),
        answer=spoken(card.message),
        came_next=tuple(utterances(card.came_next)) if with_next else (),
        feedback=card.feedback,
        verdict=card.verdict,
        sample=card.sample,
        session=card.session,
        completion=card.completion,
        choice=card.choice,
        created=card.created,
        finish_reason=card.finish_reason,
        length=card.tokens,
        is_side=card.kind is TurnKind.SIDE,
        can_rate=card.kind is TurnKind.MAIN and card.episode is None and card.state not in ALREADY_USED,
        update=card.update,
        notes=card.notes,
        episode_line=step_line(card.episode),
    )


def from_turn(turn: StoredTurn, title: str, tokens: TokenView | None, overlaps: Mapping[str, str]) -> TurnView:
    """A whole turn with its tokens, for the report."""
    asked = [message for message in turn.messages if message.get("role") in ("user", "tool")]
    return TurnView(
        number=turn.number,
        version=turn.version,
        state=turn.state,
        reason=turn.reason,
        asked=tuple(utterances(asked[-1:])),
        answer=spoken(turn.message),
        came_next=tuple(utterances(turn.next_state or ())),
        feedback=tuple(turn.feedback),
        verdict=turn.verdict,
        sample=turn.sample,
        title=title,
        created=turn.created,
        finish_reason=turn.finish_reason,
        length=len(turn.response_ids),
        episode_line=step_line(turn.episode),
        notes=tuple(turn.notes),
        tokens=tokens,
        overlaps=overlaps,
    )


def utterances(messages: Sequence[Mapping[str, Any]]) -> Iterator[Utterance]:
    for message in messages:
        yield Utterance(str(message.get("role", "")), spoken(message))


def step_line(episode: TurnEpisode | None) -> str:
    """The turn's step in its episode, in one line."""
    return describe_step(episode, None) if episode else ""

"""What a judge is: what it is shown of a turn, the opinion it gives, and how it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openclaw_rl.rendering.chat import content_text, spell_out_message, template_message
from openclaw_rl.rendering.clients import message_words
from openclaw_rl.types import Feedback, Question, Source, StoredTurn, Vote

Questions = frozenset[Question]
#: The reason when a judge that did not answer in time gave no other.
TIMED_OUT = "the judge does not answer in time"


class JudgeError(Exception):
    """There is no verdict this time; the message says why."""


class JudgeDown(JudgeError):
    """The judge cannot be asked at the moment. The turn waits.

    `suspect`: the judge failed while it worked on this turn. If it answers other turns meanwhile, the turn is blamed.
    """

    def __init__(self, reason: str, retry_after: float = 0.0, *, suspect: bool = False) -> None:
        super().__init__(reason)
        self.retry_after, self.suspect = retry_after, suspect


class JudgeFailed(JudgeError):
    """The judge cannot judge this turn. After some trials the turn gets no verdict."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge is shown of a turn."""

    turn: int
    request: str
    """The user's words and the tools' results since the response before."""
    response: str
    """The response as text, with its tool calls written out."""
    next_state: Sequence[Mapping[str, Any]]
    feedback: Sequence[Feedback]
    in_episode: bool = False
    """Whether the turn is part of an episode, which its environment has rewarded."""

    @property
    def outcome(self) -> str:
        """What came next, as text."""
        return "\n".join(content_text(message.get("content")) for message in self.next_state)

    @classmethod
    def of(cls, turn: StoredTurn) -> "Case":
        return cls(
            turn.number,
            last_request(turn.messages),
            as_text(turn.message),
            turn.next_state or (),
            turn.feedback,
            turn.episode is not None,
        )


@dataclass(frozen=True, slots=True)
class Opinion:
    """One judge's answers to the questions it was asked. None means that it cannot say."""

    score: float | None = None
    hints: tuple[str, ...] | None = None
    """Empty: nothing would have been better."""
    votes: tuple[Vote, ...] = ()
    reason: str = ""
    source: Source | None = None
    """Set where it differs from the judge's own source."""

    def answers(self, question: Question) -> bool:
        return (self.score if question is Question.SCORE else self.hints) is not None


class Judge(Protocol):
    """Answers questions about a case, or abstains with a reason."""

    @property
    def source(self) -> Source: ...

    @property
    def down(self) -> str | None:
        """Why the judge cannot be asked at the moment; None if it can."""

    @property
    def answered(self) -> int:
        """How many calls it has answered; 0 for a judge that is never down."""

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        """Raises JudgeError or TimeoutError if the judge gives no opinion."""


def last_request(messages: Sequence[dict[str, Any]]) -> str:
    """Everything that the user and tools said since the last response."""
    responses = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    new = [m for m in messages[responses[-1] + 1 if responses else 0 :] if m["role"] in ("user", "tool")]
    words = [message_words(message) for message in new]
    if new and all(message["role"] == "tool" for message in new):
        # A tool's result alone does not say what the user wanted.
        words.insert(0, last_user_words(messages))
    return "\n".join(filter(None, words))


def last_user_words(messages: Sequence[dict[str, Any]]) -> str:
    texts = (message_words(message) for message in reversed(messages) if message["role"] == "user")
    return next(filter(None, texts), "")


def as_text(message: dict[str, Any]) -> str:
    """An assistant's message as text, including its tool calls."""
    return content_text(spell_out_message(template_message(message))["content"])

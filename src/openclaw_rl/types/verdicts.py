"""Feedback on a turn, the judge's questions and votes, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from openclaw_rl.types.notes import HeardWishes
from openclaw_rl.types.sampling import Numbers, TopTokens

#: The reason of a verdict that the rules do not give because they do not understand what came next.
UNREAD = "what came next is unclear"


class Source(StrEnum):
    """Where a verdict came from."""

    EXPLICIT = "explicit"
    """Direct feedback on this turn: a thumb, a score, a sentence."""
    ENVIRONMENT = "environment"
    """An environment's reward."""
    FEEDBACK = "feedback"
    """The next state, read by rules."""
    LLM = "llm"
    CUSTOM = "custom"
    PRACTICE = "practice"
    """Nobody reacted: the answer was made to practise a note."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """Explicit feedback on a turn."""

    score: float
    """From -1 to 1; the reward of an episode may be any number."""
    text: str = ""
    source: Source = Source.EXPLICIT
    correction: str = ""
    """The answer that was wanted instead, if somebody wrote it."""
    created: float = field(default=0.0, compare=False)
    """When it was given; 0 before it is stored."""


class Question(StrEnum):
    """A question to the judge about a turn."""

    SCORE = "score"
    HINT = "hint"
    WISHES = "wishes"
    """What the user wants of all answers."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer to a question."""

    question: Question
    value: float | None
    """None if the answer could not be parsed; such a vote does not count."""
    hint: str = ""
    text: str = ""
    seconds: float = 0.0
    tokens: int = 0
    """Prompt and completion tokens of the answer."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Advice that would have improved a response, and the teacher's log-probs of the response given this advice."""

    text: str
    logprobs: Sequence[float] = ()
    """Of the response's tokens after the prompt with the hint; empty if the teacher was not asked or failed."""
    problem: str = ""
    """Why there are no log-probs although the teacher was asked."""
    top: TopTokens | None = None
    """The teacher's likeliest tokens at each position of the response, if they were requested."""
    of_policy_top: Numbers | None = None
    """The teacher's log-probs of the policy's likeliest tokens (the turn's `top`), if the teacher can give them."""
    policy_scores: Numbers | None = None
    """The policy's log-probs of the tokens in `top`, if they were requested."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of a turn."""

    score: float | None = None
    """From -1 to 1, or an episode's reward, which may be any number; None: not judged."""
    source: Source | None = None
    """Where the score comes from, or the hints if there is no score."""
    hints: tuple[Hint, ...] = ()
    """The accepted hints, the most informative first."""
    votes: tuple[Vote, ...] = ()
    reason: str = ""
    """Why there is no score or no hint, or how the next state was read."""
    seconds: float = 0.0
    plain_logprobs: Sequence[float] = ()
    """The policy's log-probs of the response after the prompt without notes; empty if nothing is distilled."""
    plain_problem: str = ""
    """Why an accepted answer under notes is not distilled, if a method would."""
    wishes: HeardWishes | None = None
    """What a judge read of the user's wishes, until it is kept in notes; None if none read them."""


class Sign(StrEnum):
    """The sign of a verdict's score."""

    GOOD = "good"
    NEUTRAL = "neutral"
    BAD = "bad"
    ABSTAINED = "abstained"
    """There is no score."""


@dataclass(frozen=True, slots=True)
class VerdictSummary:
    """A summary of a verdict."""

    score: float | None
    sign: Sign
    source: Source | None
    """None if no judge gave a score or a hint."""
    hints: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """The number of verdicts of one source, by sign."""

    source: Source | None
    signs: Mapping[Sign, int]
    """Has all four signs."""
    hinted: int
    """How many of them have a hint."""

    @property
    def total(self) -> int:
        return sum(self.signs.values())

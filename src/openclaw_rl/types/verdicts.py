"""Feedback on a turn, the judge's questions and votes, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.types.sampling import Likeliest, Numbers


class Source(StrEnum):
    """Where a verdict came from."""

    EXPLICIT = "explicit"
    """Somebody said it of this very turn: a thumb, a score, a sentence."""
    ENVIRONMENT = "environment"
    """An environment's reward."""
    FEEDBACK = "feedback"
    """The next state, read by rules."""
    LLM = "llm"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class Feedback:
    """What somebody explicitly said of a turn."""

    score: float
    """From -1 to 1."""
    text: str = ""
    source: Source = Source.EXPLICIT


class Question(StrEnum):
    """What is asked about a turn."""

    SCORE = "score"
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class Vote:
    """One answer to a question, as it was given."""

    question: Question
    value: float | None
    """None if the answer could not be read: such a vote does not count."""
    hint: str = ""
    text: str = ""
    seconds: float = 0.0
    tokens: int = 0
    """Read and written for it."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What would have made a response better, and what the teacher thinks of the response once it knows."""

    text: str
    logprobs: Sequence[float] = ()
    """Of the response's tokens under the hinted prompt; empty if the teacher was not asked, or could not say."""
    problem: str = ""
    """Why there are no log-probs, if the teacher was asked."""
    top: Likeliest | None = None
    """What the teacher finds likeliest at each token of the response, where it was asked."""
    of_policy_top: Numbers | None = None
    """The teacher's log-probs of the tokens that the policy found likeliest (the turn's `top`), where it can say."""
    policy_scores: Numbers | None = None
    """The policy's log-probs of the tokens in `top`, where they were asked for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is thought of a turn."""

    score: float | None = None
    """From -1 to 1; None: nobody could say, or nobody was asked."""
    source: Source | None = None
    """Who gave the score, or else the hints."""
    hints: tuple[Hint, ...] = ()
    """Those that were accepted, the most informative first."""
    votes: tuple[Vote, ...] = ()
    reason: str = ""
    """Why there is no score or no hint, or what the next state was read as."""
    seconds: float = 0.0


class Sign(StrEnum):
    """Which way a verdict points."""

    GOOD = "good"
    NEUTRAL = "neutral"
    BAD = "bad"
    ABSTAINED = "abstained"
    """There is no score."""


@dataclass(frozen=True, slots=True)
class VerdictSummary:
    """A verdict in short."""

    score: float | None
    sign: Sign
    source: Source | None
    """None if no judge could say anything."""
    hints: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VerdictCounts:
    """How many verdicts of one source point which way."""

    source: Source | None
    signs: Mapping[Sign, int]
    """All four are there."""
    hinted: int
    """How many of them came with a hint."""

    @property
    def total(self) -> int:
        return sum(self.signs.values())

"""The nouns that flow through the loop. Data only: no behaviour, no imports from the rest of the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Numbers = NDArray[np.float32]

#: The policy version that is the model as it was loaded, without any adapter.
BASE_VERSION = 0


class Priority(IntEnum):
    """Who goes first when the engine is full; a smaller number goes first."""

    USER = 0
    BACKGROUND = 1


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Log-probs are always of the raw distribution, whatever is set here."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Only the k likeliest tokens may be drawn; 0 means all."""
    seed: int = 0
    """Start of this request's own random stream; choice i of n draws from stream (seed, i)."""
    stop_token_ids: frozenset[int] = frozenset()
    """A completion ends with the first of these, which is part of it."""
    top_logprobs: int = 0
    """Also return the k likeliest tokens at each position, with their raw log-probs."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """`n` completions of one prompt, given as token ids."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    n: int = 1
    version: int | None = None
    """The policy version to sample from; None means the newest."""
    priority: Priority = Priority.USER


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one completion, as the engine drew it."""

    index: int
    """Which of the request's n completions."""
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    """Set on the last token of a completion."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """How likely are the last `last_n` of these tokens, each after all before it? At least one token is before them."""

    ids: Sequence[int]
    last_n: int
    version: int = BASE_VERSION
    top_k: int = 0
    """Also return the k likeliest tokens at each position."""
    targets: Ids | None = None
    """Also return the log-probs of these tokens, as many for each position: [last_n, any]."""


@dataclass(frozen=True, slots=True, eq=False)
class Likeliest:
    """The k likeliest tokens at each position, the likeliest first: arrays [positions, k]."""

    ids: Ids
    logprobs: Numbers


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw log-probs, one entry for each scored position."""

    logprobs: list[float]
    top: Likeliest | None = None
    targets: Numbers | None = None


class TurnKind(StrEnum):
    """Whether a turn may be trained on."""

    MAIN = "main"
    SIDE = "side"


class Continuation(StrEnum):
    """How a turn's prompt goes on from the turn before it."""

    NEW = "new"
    """There is no turn before it."""
    EXTENDS = "extends"
    """What the client sent renders to exactly the recorded tokens, and then more."""
    REALIGNED = "realigned"
    """The client returned the history changed in form; the recorded tokens were taken instead."""
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
    """Equal for requests that say the same, whatever form the client gave them: a retry has its original's."""
    end_key: bytes
    """The same for the conversation after this response: a continuation is found by it."""
    top: Likeliest | None = None


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
class NextStep:
    """How far the next training step is."""

    step: int
    samples: int
    """Judged turns that wait for it."""
    needed: int
    training: bool = False
    """Whether it is being made."""


class SampleKind(StrEnum):
    """Which signals a sample trains on."""

    OPD_RL = "opd+rl"
    OPD = "opd"
    RL = "rl"


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


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """For each token of a response, n tokens that could stand in its place: arrays [tokens, n]."""

    ids: Ids
    old_logprobs: Numbers
    """Of the policy that sampled the response."""
    advantages: Numbers
    """0 for what does not count."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sample inside a training sequence: its response is the tokens [start, stop), with a signal for each."""

    turn: int
    """Its number in the ledger."""
    start: int
    stop: int
    old_logprobs: Sequence[float]
    """Of the policy that sampled it: raw, as recorded."""
    advantages: Sequence[float]
    alternatives: Alternatives | None = None
    """What is learned of other tokens than those that were sampled."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """Tokens that go through the model once, with the samples in them: turns that extend each other share one."""

    ids: Sequence[int]
    spans: Sequence[Span]
    """In order, none overlapping another; no span begins at 0."""


#: Bound of log-ratios before they are exponentiated: e^20 is far beyond any ratio that means something, and its
#: products are still finite in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which policy loss, and its constants."""

    kind: str = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    kl_coef: float = 0.0
    """Weight of the divergence from the base model."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How a step is made, whichever engine makes it."""

    loss: LossSettings
    epochs: int
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    max_kl: float
    """A step that moves the policy further than this, a token, is refused."""
    seed: int

"""Sampling and scoring: requests, what an answer may look like if a client restricts it, tokens and their log-probs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray


class Thinking(StrEnum):
    """Whether reasoning may stand before the restricted part of an answer."""

    NONE = "none"
    OPTIONAL = "optional"
    """The answer may begin with a `<think>` block."""
    BEGUN = "begun"
    """The prompt has opened the block; the answer closes it."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A JSON value that fits a schema, with fixed text around it."""

    schema: str
    """As JSON."""
    before: str = ""
    after: str = ""
    strict: bool = True
    """Whether a keyword that cannot be enforced is refused; otherwise it is ignored."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Restricts an answer to one JSON value (`content`) or to tool calls (`calls`); if both are given, to either.

    With a `trigger`, text is free, and only calls within it are restricted.
    """

    content: JsonForm | None = None
    calls: tuple[JsonForm, ...] = ()
    """The calls that are possible."""
    separator: str | None = None
    """The text between two calls; None if there is only one call."""
    thinking: Thinking = Thinking.NONE
    trigger: str = ""
    """How every call begins. Text that is not a call does not contain it."""


Ids = NDArray[np.int32]
Numbers = NDArray[np.float32]

#: The policy version of the base model: the weights as they were loaded, without an adapter.
BASE_VERSION = 0
#: The line of policies that everybody is served by who has none of their own. Other lines are named after their owners.
SHARED = "shared"


class Priority(IntEnum):
    """The order of requests when the engine is full; smaller numbers go first."""

    USER = 0
    BACKGROUND = 1
    IDLE = 2
    """Rests while there is any other work, where the engine has an order of its own, and goes on afterwards."""


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. Log-probs are always those of the raw distribution; no parameter changes them."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Draw only from the k likeliest tokens; 0 means all."""
    seed: int = 0
    """Seed of this request's random streams: choice i of n draws from the stream (seed, i)."""
    stop_token_ids: frozenset[int] = frozenset()
    """A completion ends with the first of these tokens and includes it."""
    top_logprobs: int = 0
    """Also return the k likeliest tokens at each position, with their raw log-probs."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Asks for `n` completions of one prompt, which is given as token ids."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    n: int = 1
    version: int | None = None
    """The policy version to sample from; None means the newest of the line."""
    priority: Priority = Priority.USER
    owner: str = ""
    """Whose prompt it is (the name of an API key; empty for the server's own work). Owners share no cached prefixes."""
    constraint: Constraint | None = None
    """Restricts each completion. Only for samplers that say that they can (`SamplerCapabilities.constrains`)."""
    line: str = SHARED
    """Whose line of policies answers if no version is named; the shared one does for a line without policies."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one completion, as the engine drew it."""

    index: int
    """Which of the n completions it belongs to."""
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    """Set on the last token of a completion."""
    forced: bool = False
    """Whether the request's constraint allowed no other token, or only tokens that end the completion."""


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Asks for the log-probs of the last `last_n` tokens of `ids`, which must have at least one token before them."""

    ids: Sequence[int]
    last_n: int
    version: int = BASE_VERSION
    top_k: int = 0
    """Also return the k likeliest tokens at each position."""
    targets: Ids | None = None
    """Also return the log-probs of these tokens: an array [last_n, n] with n tokens for each position."""
    owner: str = ""
    """As in a `SampleRequest`."""
    priority: Priority = Priority.BACKGROUND
    """Before which requests it goes, where the engine has an order of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k likeliest tokens at each position, the likeliest first: arrays [positions, k]."""

    ids: Ids
    logprobs: Numbers


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw log-probs, one entry for each scored position."""

    logprobs: list[float]
    top: TopTokens | None = None
    targets: Numbers | None = None

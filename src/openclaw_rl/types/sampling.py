"""What is asked of a sampler, and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

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

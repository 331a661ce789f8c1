"""The nouns that flow through the loop. Data only: no behaviour, no imports from the rest of the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

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
    top: Sequence[tuple[tuple[int, float], ...]] = ()


@dataclass(frozen=True, slots=True)
class Feedback:
    """What somebody explicitly said of a turn."""

    score: float
    """From -1 to 1."""
    text: str = ""

"""The messages between the sampler and its worker process. Plain data, pickled over a pipe."""

from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.types import SampledToken, SampleRequest, ScoreRequest, Scores


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The settings with which a worker loads the model and serves it."""

    model: Path
    device: str
    """cpu, cuda or auto."""
    dtype: str
    """float32, bfloat16, or auto: bfloat16 on CUDA; on a CPU a measurement decides."""
    max_sequences: int
    max_context: int | None
    """None: as long as the model allows and the cache holds."""
    cache_gib: float | None
    """Memory for keys and values; None: a share of what the machine has free."""
    policy_slots: int
    lora_rank: int
    """The highest rank of an adapter; 0 where a policy is a model with all its weights."""
    cuda_device: str = ""
    """The only GPU that the worker sees; empty: all."""
    pack_weights: str = "off"
    """on, half, off or auto: whether products are computed with a packed copy of the weights, on a CPU."""
    measurements: Path | None = None
    """The folder where measurements of this machine are kept; None: nowhere."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded the model."""

    device: str
    dtype: str
    max_context: int
    cache_tokens: int
    weight_bytes: int
    dtype_reason: str = ""
    """Why the precision was chosen, if a measurement chose it."""
    packed_bytes: int = 0
    """Memory of the packed copy of the weights; 0 if there is none."""
    packed_dtype: str = ""
    """Its precision."""
    shared: bytes | None = None
    """What another worker process needs to use the same weights in memory."""


@dataclass(frozen=True, slots=True)
class Add:
    """Start a request with the policy version in a slot; slot 0 is the base model."""

    id: int
    request: SampleRequest
    version: int
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """Score given tokens with the policy version in a slot."""

    id: int
    request: ScoreRequest
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request, or one of its completions."""

    id: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """Load a policy version into a slot, in place of the version that is there."""

    version: int
    slot: int
    folder: Path


@dataclass(frozen=True, slots=True)
class PolicyLoaded:
    """The answer to LoadPolicy; `error` is a sentence if it failed."""

    version: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request cannot be done; `reason` is a sentence for the client."""

    id: int
    reason: str
    refused: bool = False
    """Whether its constraint is the reason."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The result of one step."""

    tokens: dict[int, list[SampledToken]]
    """By request."""
    cached: dict[int, int]
    """For each request that got its first token: how many of its prompt tokens were in the cache."""
    scores: dict[int, Scores]
    """Of the scoring requests that are done."""
    active: int
    """Sequences in the running batch."""
    refused: dict[int, str] = field(default_factory=dict)
    """Requests that end because their constraint cannot be enforced, with the reason."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot start; `reason` is a sentence for the user."""

    reason: str


Command = Add | Score | Cancel | LoadPolicy
Report = Ready | Tokens | PolicyLoaded | RequestFailed | Failed

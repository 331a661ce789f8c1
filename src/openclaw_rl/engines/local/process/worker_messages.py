"""Messages between the server and the processes of sampler and learner: data, pickled over a pipe.

The learner's process reports when it has started. Then every call is answered by one report, in order.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_rl.types import SampledToken, SampleRequest, ScoreRequest, Scores, TrainingSettings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a process among the ranks that train one policy."""

    number: int
    """0 is the first rank, which writes files and whose answers count."""
    count: int
    shards: bool
    """Whether each rank holds only a part of the weights."""
    host: str = LOOPBACK
    """Where the first rank waits for the others: this machine's loopback, which they all share. Empty: each was placed
    by itself, perhaps on a machine of its own, and they meet at the first one's address."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address where the first rank waits: its first report, and the first command to the others."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The ranks that train one policy together."""

    devices: tuple[str, ...]
    """One for each rank; `auto` is the rank's own CUDA device, or the CPU where there is none."""
    shards: bool = False


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """Everything that the learner's process needs in order to load the model and train a policy."""

    model: Path
    device: str
    dtype: str
    """float32, bfloat16, or auto: bfloat16 on CUDA, `cpu_dtype` on a CPU."""
    rank: int
    """Of the adapter; 0 trains all weights."""
    alpha: float
    dropout: float
    modules: tuple[str, ...]
    training: TrainingSettings
    micro_batch_tokens: int | None
    """None: what suits the model and its device."""
    offload: bool
    """Whether the optimiser's state leaves the device between steps."""
    base_model: str
    """Name of the base model in the adapters' files."""
    cpu_dtype: str = "float32"
    quantize: str = "none"
    """none, 8bit or 4bit: how the base weights are stored."""
    experts: bool = False
    """Whether the adapter is on experts too."""
    trusts_code: bool = False
    """Whether code in the model's folder may run."""
    custom_loss: str | None = None
    cuda_device: str = ""
    """The number of the only CUDA device that the process may use; empty: all."""
    shared: bytes | None = None
    """The base weights as the sampler shares them; without it the process loads its own copy."""
    ranks: RankOptions | None = None
    """Only for the server: several processes train the policy together."""
    place: RankPlace | None = None
    """Only for a process: it is one of several."""


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """Call a method of the `PolicyTrainer`. The answer is Done with its result, or Refused."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Started:
    """The process has loaded the model."""

    weight_bytes: int
    devices: tuple[str, ...]
    """Where it runs: the device of each rank."""


@dataclass(frozen=True, slots=True)
class Done:
    """The method has returned."""

    result: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """The method has failed; `reason` is a sentence without its full stop."""

    reason: str
    may_pass: bool = False
    """Whether the step is worth another trial from its snapshot."""
    stopped: bool = False
    """Whether the server asked for it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The process cannot start; `reason` is a sentence for the user."""

    reason: str


LearnerReport = Started | Done | Refused | Broken | Meeting


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
    quantize: str = "none"
    """none, 8bit or 4bit: how the base weights are stored."""
    trusts_code: bool = False
    """Whether code in the model's folder may run."""


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
    shared: bytes | None = None
    """What another worker process needs to use the same weights in memory."""


@dataclass(frozen=True, slots=True)
class Packed:
    """From now on the worker computes with a packed copy of the weights, or it has decided to have none."""

    bytes: int
    """Memory of the copy; 0 if there is none."""
    dtype: str
    """Its precision."""


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


SamplerReport = Ready | Packed | Tokens | PolicyLoaded | RequestFailed | Failed

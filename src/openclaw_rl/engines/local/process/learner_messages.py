"""Messages between the server and the learner's process: plain data, pickled over a pipe.

The process reports when it has started. Then every call is answered by one report, in order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.types import TrainingSettings

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
    micro_batch_tokens: int
    offload: bool
    """Whether the optimiser's state leaves the device between steps."""
    base_model: str
    """Name of the base model in the adapters' files."""
    cpu_dtype: str = "float32"
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


Report = Started | Done | Refused | Broken | Meeting

"""Messages between the server and the learner's process: plain data, pickled over a pipe.

The process reports when it has started. Then every call is answered by one report, in order.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.types import TrainingSettings

#: Tells the learner's process to end the step that it computes.
STOP_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """Everything that the learner's process needs in order to load the model and train a policy."""

    model: Path
    device: str
    dtype: str
    rank: int
    """Of the adapter; 0 trains all weights."""
    alpha: float
    dropout: float
    modules: tuple[str, ...]
    training: TrainingSettings
    micro_batch_tokens: int
    checkpointing: bool
    offload: bool
    """Whether the optimiser's state leaves the device between steps."""
    base_model: str
    """Name of the base model in the adapters' files."""
    custom_loss: str | None = None
    cuda_device: str = ""
    """The number of the only CUDA device that the process may use; empty: all."""
    shared: bytes | None = None
    """The base weights as the sampler shares them; without it the process loads its own copy."""


@dataclass(frozen=True, slots=True)
class TrainerCall:
    """Call a method of the `PolicyTrainer`. The answer is Done with its result, or Refused."""

    method: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Started:
    """The process has loaded the model."""

    weight_bytes: int


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


Report = Started | Done | Refused | Broken

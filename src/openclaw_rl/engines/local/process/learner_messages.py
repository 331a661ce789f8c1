"""Messages between the server and the learner's process: plain data, pickled over a pipe.

Every command is answered by one report, in order.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.types import TrainingSequence, TrainingSettings

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
    shared: bytes | None = None
    """The base weights as the sampler shares them; without it the process loads its own copy."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Start again from the base model."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Compute a batch's gradient. The result is a PassResult."""

    sequences: Sequence[TrainingSequence]


@dataclass(frozen=True, slots=True)
class OptimStep:
    """Apply the gradient. The result is its norm."""


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Keep the policy and the optimiser's state. The result is the snapshot's name."""


@dataclass(frozen=True, slots=True)
class Restore:
    snapshot: str


@dataclass(frozen=True, slots=True)
class ScoreSpans:
    """Compute the log-probs of the spans' tokens. The result is SpanLogprobs."""

    sequences: Sequence[TrainingSequence]
    base: bool


@dataclass(frozen=True, slots=True)
class WritePolicy:
    folder: Path


@dataclass(frozen=True, slots=True)
class Save:
    folder: Path
    steps: int


@dataclass(frozen=True, slots=True)
class Load:
    """Continue from a checkpoint. The result is the number of steps."""

    folder: Path


@dataclass(frozen=True, slots=True)
class Started:
    """The process has loaded the model."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The command was carried out."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The command was not carried out; `reason` is a sentence without its full stop."""

    reason: str
    may_pass: bool = False
    """Whether the step is worth another trial from its snapshot."""
    stopped: bool = False
    """Whether the server asked for it."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The process cannot start; `reason` is a sentence for the user."""

    reason: str


Command = Reset | ForwardBackward | OptimStep | TakeSnapshot | Restore | ScoreSpans | WritePolicy | Save | Load
Report = Started | Done | Refused | Broken

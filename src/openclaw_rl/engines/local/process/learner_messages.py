"""What the learner and its worker process say to each other. Plain data, pickled over a pipe."""

from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.base import StepResult
from openclaw_rl.types import TrainingSequence, TrainingSettings


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """All that a learner needs to know to load the model and train a policy."""

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
    """How the base model is called in the adapters' files."""
    custom_loss: str | None = None
    shared: bytes | None = None
    """The base weights as the sampler shares them; without it they are loaded again."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Begin with the base model."""


@dataclass(frozen=True, slots=True)
class Step:
    """Train on a batch."""

    sequences: list[TrainingSequence]


@dataclass(frozen=True, slots=True)
class Undo:
    """Take the last step back."""


@dataclass(frozen=True, slots=True)
class WritePolicy:
    folder: Path


@dataclass(frozen=True, slots=True)
class Save:
    folder: Path


@dataclass(frozen=True, slots=True)
class Load:
    folder: Path


@dataclass(frozen=True, slots=True)
class Started:
    """The learner has loaded the model."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Done:
    """The last command was obeyed."""

    result: StepResult | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The last command was not obeyed, and changed nothing; `reason` is a sentence without its full stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The learner cannot start; `reason` is a sentence for the user."""

    reason: str


Command = Reset | Step | Undo | WritePolicy | Save | Load
Report = Started | Done | Refused | Broken

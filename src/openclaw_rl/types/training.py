"""What a training step works on, how it is made and what became of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from openclaw_rl.types.sampling import Ids, Numbers

#: Bound of log-ratios before they are exponentiated: e^20 is far beyond any ratio that means something, and its
#: products are still finite in float32.
MAX_LOG_RATIO = 20.0


class SampleKind(StrEnum):
    """Which signals a sample trains on."""

    OPD_RL = "opd+rl"
    OPD = "opd"
    RL = "rl"


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


@dataclass(frozen=True, slots=True)
class NextStep:
    """How far the next training step is."""

    step: int
    samples: int
    """Judged turns that wait for it."""
    needed: int
    training: bool = False
    """Whether it is being made."""


class StepOutcome(StrEnum):
    """What became of a training step."""

    APPLIED = "applied"
    UNDONE = "undone"
    """Lost with the learner's memory: its turns can be trained on again."""
    ROLLED_BACK = "rolled_back"
    """Taken back by the owner: its turns are not trained on again."""
    QUARANTINED = "quarantined"
    """Refused: its turns are set aside."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step that a checkpoint remembers."""

    step: int
    version: int
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """A training step as the ledger holds it."""

    number: int
    step: int
    version: int | None
    """The policy that it made, if it made one."""
    outcome: StepOutcome
    turns: tuple[int, ...]
    """Also those that were forgotten since."""
    reason: str
    """Why it was refused, if it was."""
    metrics: Mapping[str, Any]
    created: float

"""Input, settings and outcome of a training step, and what an outside trainer is given: leases and samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from openclaw_rl.types.sampling import Ids, Numbers

#: Log-ratios are clamped to this size before they are exponentiated: e^20 is far above every meaningful ratio, and its
#: products are still finite in float32.
MAX_LOG_RATIO = 20.0


class SampleKind(StrEnum):
    """Which signals a sample trains on."""

    OPD_RL = "opd+rl"
    OPD = "opd"
    RL = "rl"
    NOTES = "notes"
    """An answer that was accepted under notes, after the prompt without them."""
    PRACTICE = "practice"
    """An answer that nobody asked for, to learn a note for good."""


@dataclass(frozen=True, slots=True, eq=False)
class Alternatives:
    """For each token of a response, n other tokens at its position: arrays [tokens, n]."""

    ids: Ids
    old_logprobs: Numbers
    """Of the policy that sampled the response."""
    advantages: Numbers
    """0 for tokens that do not count."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sample inside a training sequence: its response is the tokens [start, stop), each with an advantage."""

    turn: int
    """Its number in the ledger."""
    start: int
    stop: int
    old_logprobs: Sequence[float]
    """Of the policy that sampled it: raw, as recorded."""
    advantages: Sequence[float]
    alternatives: Alternatives | None = None
    """The tokens besides the sampled ones that the sample also trains on."""
    forced: Sequence[bool] = ()
    """Which of its tokens a constraint forced; empty if none. Nothing is learned about them, nor kept as it was."""


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """Tokens that go through the model once, and the samples in them. Turns that extend each other share a sequence."""

    ids: Sequence[int]
    spans: Sequence[Span]
    """In order, without overlaps; no span starts at 0."""

    @property
    def read_length(self) -> int:
        """How many tokens the model has to read: the last token of the last span is only predicted."""
        return self.spans[-1].stop - 1


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Which policy loss, and its constants."""

    kind: str = "ppo"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    kl_coef: float = 0.0
    """Weight of the KL penalty towards the base model."""


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """The settings of a training step, for every engine."""

    loss: LossSettings
    epochs: int
    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    max_kl: float
    """A step that moves the policy further than this, as KL per token, is refused."""
    seed: int


@dataclass(frozen=True, slots=True)
class NextStep:
    """Progress towards the next training step."""

    step: int
    samples: int
    """Judged turns that are ready for it."""
    needed: int
    training: bool = False
    """Whether the step is running."""


@dataclass(frozen=True, slots=True)
class LineState:
    """Where a line of policies stands."""

    line: str
    policy_version: int
    """Of the policy that serves it: the shared line's, if it has none of its own."""
    step: int | None
    """Its last step; None if it was not looked at since the server's start."""
    samples: int
    """Judged turns that wait for its next step."""
    needed: int
    is_in_learner: bool
    trouble: str
    """Why no step of it can be made; empty if one can."""
    guard: str
    """What its guard found last, as sentences."""


class StepOutcome(StrEnum):
    """What became of a training step."""

    APPLIED = "applied"
    UNDONE = "undone"
    """Lost when the learner crashed or restarted: its turns can be trained on again."""
    ROLLED_BACK = "rolled_back"
    """Undone by a rollback: its turns are not trained on again."""
    QUARANTINED = "quarantined"
    """Refused: its turns are set aside."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A step that a checkpoint contains."""

    step: int
    version: int
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """A training step as the ledger holds it."""

    number: int
    step: int
    version: int | None
    """The policy version that it produced, if any."""
    outcome: StepOutcome
    turns: tuple[int, ...]
    """Including turns that were deleted later."""
    reason: str
    """Why the step was refused, if it was."""
    metrics: Mapping[str, Any]
    created: float


class LeaseEnd(StrEnum):
    """How a lease ended."""

    CONFIRMED = "confirmed"
    RAN_OUT = "ran out"
    TAKEN_BACK = "taken back"
    """By this program: the lease held too few turns, or another learner has taken over the run."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Judged turns that an outside trainer holds until it confirms them or the lease ends."""

    id: str
    turns: tuple[int, ...]
    created: float
    expires: float
    """In seconds since 1970."""


@dataclass(frozen=True, slots=True)
class OutsideSample:
    """A judged turn as an outside trainer receives it. Lists have one number for each response token."""

    turn: int
    session: str
    group: str | None
    """The group of its episode; None for a turn outside groups."""
    messages: Sequence[Mapping[str, Any]]
    message: Mapping[str, Any]
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[int]
    """0 where a constraint forced the token, so that it teaches nothing."""
    rollout_log_probs: Sequence[float]
    """Raw: temperature 1, nothing cut off."""
    teacher_log_probs: Sequence[float] | None
    """Of the teacher that knows the hint, as recorded; None without a hint."""
    advantages: Sequence[float]
    """What the method of this server makes of reward and hint: all that a trainer needs for its loss."""
    reward: float
    """The part of the advantages that all tokens share. The rest comes from the hint."""
    score: float | None
    """The verdict itself, or the reward of the episode."""
    policy_version: int
    weight_version: str
    """What the inference server called the weights that answered."""
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """An answer to an outside trainer that asked for turns."""

    lease: Lease | None
    """None if there are not enough turns."""
    step: int
    """The step that the turns are for."""
    groups: Sequence[Sequence[OutsideSample]]
    """Whole groups; a turn outside groups is a group of its own."""
    waiting_for: str
    """Why there are no turns; empty if there are."""

"""What an outside trainer is given: leases on judged turns, and the turns as samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


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

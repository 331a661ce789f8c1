"""Episodes: sessions that are rewarded as a whole; and groups: the attempts at one task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

#: A larger reward, positive or negative, can only be a mistake.
MAX_REWARD = 1e6
#: The largest from a key that may not operate the server: its users share the policy, and none counts more than others.
MAX_USER_REWARD = 1.0
#: The most attempts in a group; only a mistake would ask for more.
MAX_GROUP_SIZE = 1024


class EpisodeMode(StrEnum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"
    """Its reward is recorded, and nothing of it is trained on."""


class EpisodeState(StrEnum):
    """Whether an episode has been rewarded."""

    HELD = "held"
    """Its reward is awaited. No judge looks at its turns, and none is trained on."""
    REWARDED = "rewarded"
    FAILED = "failed"
    """The environment failed, or the episode was abandoned. It has no reward and is not in its group's mean."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What an environment says about one turn of an episode. The turn is named by its index or its completion's id."""

    index: int | None = None
    id: str | None = None
    reward: float | None = None
    text: str = ""
    """What would have improved the turn's response; it becomes a hint."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What an environment says about an episode when it ends: a reward, or the error because of which there is none."""

    reward: float | None = None
    error: str | None = None
    task: str = ""
    group: str | None = None
    group_size: int | None = None
    """How many attempts the group has; None: the server's --group-size."""
    solved: bool | None = None
    steps: Sequence[TurnResult] = ()
    text: str = ""
    """What would have improved the last response."""


@dataclass(frozen=True, slots=True)
class EpisodeSummary:
    """A session's episode."""

    mode: EpisodeMode
    state: EpisodeState
    task: str
    group: str | None
    reward: float | None
    solved: bool | None
    error: str
    """Why it failed."""
    group_mean: float | None = None
    """The mean reward of the group's attempts; None before the group is complete, and without a group."""
    rewarded: int = 0
    """How many attempts of the group have a reward."""
    is_constant: bool = False
    """Whether all attempts of the group got the same reward."""
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class TurnEpisode(EpisodeSummary):
    """A turn's episode, and the turn's step in it."""

    step: int | None = None
    """The turn's index among the episode's main turns; None before the reward, and for turns that do not count."""
    step_reward: float | None = None
    step_mean: float | None = None
    """The mean reward of this step in the group; None if fewer than two attempts have one."""


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """A group that waits for attempts."""

    name: str
    ended: int
    """Attempts that were rewarded or failed."""
    size: int


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """The number of episodes in each state, and how those with a reward went."""

    states: Mapping[EpisodeState, int]
    mean_reward: float | None
    solved: float | None
    """The share that was solved, of those of which it is known."""

    @property
    def total(self) -> int:
        return sum(self.states.values())


@dataclass(frozen=True, slots=True)
class Queue:
    """Turns on their way to a training step."""

    held: int
    """Turns of episodes without a reward."""
    to_judge: int
    to_train: int
    """Judged turns, including those that wait for the rest of their group."""

"""The advantage of an episode over the other attempts at its task.

It is the reward minus the mean of the group's rewards, each attempt counted once, whatever its number of turns. It is
not divided by the deviation. A step reward adds its distance from the mean of the same step in the group.
"""

from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.types import TurnEpisode

#: A mean is rounded. A distance from it that is this small compared with the reward is none.
MAX_ROUNDING = 1e-9


def group_advantage(episode: TurnEpisode, step_reward_coef: float) -> float:
    """The advantage of each token of a turn in a settled group."""
    outcome = distance(episode.reward, episode.group_mean)
    step = step_reward_coef * distance(episode.step_reward, episode.step_mean)
    return rounded(outcome + step, outcome)


def distance(reward: float | None, mean: float | None) -> float:
    """How far a reward is above the mean; 0 without a reward or without others to compare it with."""
    if reward is None or mean is None:
        return 0.0
    return rounded(reward - mean, reward)


def rounded(difference: float, number: float) -> float:
    """A difference from a number, or 0 if it is only rounding."""
    return difference if abs(difference) > MAX_ROUNDING * max(1.0, abs(number)) else 0.0


def shown_advantage(episode: TurnEpisode, options: MethodOptions) -> float | None:
    """The advantage of a turn over its group, to be shown; None if it is not measured from its group."""
    compared = options.baseline == "group" and episode.reward is not None and episode.group_mean is not None
    return group_advantage(episode, options.step_reward_coef) if compared else None


def no_advantage(episode: TurnEpisode) -> str:
    """Why a turn in a settled group has no advantage."""
    if episode.rewarded < 2:
        return "fewer than two attempts of its group were rewarded"
    if episode.is_constant:
        return "all attempts of its group got the same reward"
    return "its reward is the mean of its group"

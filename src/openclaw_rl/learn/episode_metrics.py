"""What a step reports about the episodes in its batch."""

from collections.abc import Sequence
from statistics import fmean

from openclaw_rl.types import StoredTurn

EPISODE_METRICS = ("episodes", "episode_reward", "solved", "groups", "constant_groups")


def episode_metrics(turns: Sequence[StoredTurn], constant_groups: int) -> dict[str, float]:
    """Numbers by name; empty if no turn is part of an episode. Each episode counts once, whatever its turns.

    `constant_groups` is how many groups were dropped since the step before, because their rewards were equal.
    """
    episodes = {turn.session: turn.episode for turn in turns if turn.episode is not None}
    if not episodes:
        return {}
    rewards = [episode.reward for episode in episodes.values() if episode.reward is not None]
    solved = [episode.solved for episode in episodes.values() if episode.solved is not None]
    groups = {(key.owner, episode.group) for key, episode in episodes.items() if episode.group is not None}
    return {
        "episodes": len(episodes),
        **({"episode_reward": fmean(rewards)} if rewards else {}),
        **({"solved": fmean(solved)} if solved else {}),
        "groups": len(groups),
        "constant_groups": constant_groups,
    }

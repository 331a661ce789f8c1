"""Episodes and groups in words, for status, sessions and the report."""

from collections.abc import Sequence

from openclaw_rl.types import EpisodeMode, EpisodeState, EpisodeSummary, GroupProgress, TurnEpisode

#: Groups whose progress is listed.
MAX_GROUPS_LISTED = 5


def outcome(episode: EpisodeSummary) -> str:
    """How an episode ended, in a few words."""
    if episode.state is EpisodeState.HELD:
        return "waits for its reward"
    if episode.state is EpisodeState.FAILED:
        return f"failed: {episode.error}"
    solved = {True: ", solved", False: ", not solved", None: ""}[episode.solved]
    return f"reward {episode.reward:+g}{solved}"


def describe(episode: EpisodeSummary) -> str:
    """An episode in one line."""
    mean = f"mean of its group {episode.group_mean:+g}" if episode.group_mean is not None else ""
    parts = (
        "evaluation" if episode.mode is EpisodeMode.EVAL else "episode",
        f"task {episode.task}" if episode.task else "",
        f"group {episode.group}" if episode.group else "",
        outcome(episode),
        mean and f"{mean} ({episode.rewarded} attempts)",
    )
    return " · ".join(filter(None, parts))


def describe_step(episode: TurnEpisode, advantage: float | None) -> str:
    """A turn's step in its episode, in one line; empty if it is none. The advantage is None if there is none."""
    if episode.step is None:
        return ""
    own = f"reward of this step {episode.step_reward:+g}" if episode.step_reward is not None else ""
    mean = f" (mean {episode.step_mean:+g})" if own and episode.step_mean is not None else ""
    parts = (f"step {episode.step}", own + mean, f"advantage {advantage:+g}" if advantage is not None else "")
    return " · ".join(filter(None, parts))


def groups_waiting(groups: Sequence[GroupProgress]) -> str:
    """A sentence about the groups that wait for attempts; empty if there are none."""
    if not groups:
        return ""
    listed = [f"{group.ended} of {group.size}" for group in groups[:MAX_GROUPS_LISTED]]
    more = ", …" if len(groups) > MAX_GROUPS_LISTED else ""
    count = "1 group waits" if len(groups) == 1 else f"{len(groups)} groups wait"
    return f"{count} for attempts: {', '.join(listed)}{more}."

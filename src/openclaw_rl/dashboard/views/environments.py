"""Environments: groups of attempts, their rewards over time."""

from collections.abc import Sequence

from openclaw_rl.dashboard.components.svg import Chart, Series, line_chart, share
from openclaw_rl.types import EpisodePoint

#: Episodes that a point of a curve averages over.
WINDOW = 16


def reward_charts(points: Sequence[EpisodePoint]) -> list[Chart]:
    """The mean reward of the last episodes over time, and the share that was solved where it is known."""
    charts = []
    if points:
        rewards = running_mean([(place, point.reward) for place, point in enumerate(points, 1)])
        charts.append(
            line_chart(f"Reward, mean of the last {WINDOW} episodes", [Series("", rewards, "s0")], unit="episode")
        )
    solved = [(place, float(point.solved)) for place, point in enumerate(points, 1) if point.solved is not None]
    if solved:
        series = [Series("", running_mean(solved), "s2")]
        title = f"Solved, share of the last {WINDOW} episodes"
        charts.append(line_chart(title, series, unit="episode", lowest=0, highest=1, form=share))
    return charts


def running_mean(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Each point averaged with those before it, at most `WINDOW`."""
    means = []
    for place in range(len(points)):
        part = points[max(0, place - WINDOW + 1) : place + 1]
        means.append((float(points[place][0]), sum(value for _, value in part) / len(part)))
    return means

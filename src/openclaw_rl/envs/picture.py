"""A study as a picture: the share of tasks solved while training, and of held-out tasks before and after."""

from pathlib import Path
from typing import TYPE_CHECKING

from openclaw_rl.dashboard.components import charts
from openclaw_rl.envs.study import Study, curve, solved_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 6.4, 3.6
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def save_picture(study: Study, path: Path, title: str) -> None:
    """Raises UserError without Matplotlib, or if the file cannot be written."""
    figure = charts.new_figure(WIDTH, HEIGHT)
    axes = figure.subplots()
    charts.dress(axes, charts.plain(title), "training episodes", "tasks solved")
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks(TICKS, [f"{100 * tick:.0f} %" for tick in TICKS])
    points = curve(study.training) if study.training else []
    ends = [point["episodes"] for point in points]
    axes.plot(ends, [point["solved"] for point in points], color=charts.SERIES[0], linewidth=2, label="training tasks")
    for tally, place in ((study.before, 0.0), (study.after, ends[-1] if ends else 1.0)):
        if tally is not None and (share := solved_share(tally)):
            _point(axes, place, share.mean, (share.low, share.high), "held-out tasks, 95 %" if place == 0 else "")
    charts.add_legend(figure, axes.get_legend_handles_labels()[0])
    charts.save_png(figure, path)


def _point(axes: "Axes", place: float, mean: float, interval: tuple[float, float], label: str) -> None:
    error = [[mean - interval[0]], [interval[1] - mean]]
    axes.errorbar([place], [mean], error, fmt="o", color=charts.SERIES[1], capsize=4, label=label or "_")

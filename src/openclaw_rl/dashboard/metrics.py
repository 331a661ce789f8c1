"""The learner's metrics of each step, as far as they can be read, and their charts."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from markupsafe import Markup

from openclaw_rl.dashboard.components import charts
from openclaw_rl.learn.episode_metrics import EPISODE_METRICS
from openclaw_rl.learn.reporting import StepReport

FILE = "metrics.jsonl"
METRICS = frozenset(field.name for field in fields(StepReport)) | {*EPISODE_METRICS}
WIDTH, HEIGHT = 4.6, 2.5
#: Up to this many steps, each has a dot.
MAX_DOTS = 30


@dataclass(frozen=True, slots=True)
class Metrics:
    """The steps of a run, by number. A step that was repeated is there once, as it was made last."""

    steps: list[dict[str, float]]
    unreadable: int
    """Lines that are not a step, for example because the disk was full."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Some metrics over steps, in one chart."""

    name: str
    title: str
    lines: tuple[tuple[str, str], ...]
    """(metric, label); a single line needs no label."""
    lowest: float | None = None
    """The lower end of the axis, if it is fixed."""
    highest: float | None = None
    stacked: bool = False
    """Stacked bars instead of lines."""


PANELS = (
    Panel("reward", "Reward: mean score of a batch", (("reward", ""),), -1.05, 1.05),
    Panel("episodes", "Mean reward of an episode", (("episode_reward", ""),)),
    Panel("solved", "Share of episodes that were solved", (("solved", ""),), 0, 1.05),
    Panel("loss", "Loss", (("loss", ""),)),
    Panel("kl", "KL per token", (("kl_old", "to the previous policy"), ("kl_base", "to the base model")), 0),
    Panel("clip", "Share of clipped tokens", (("clip_fraction", ""),), 0),
    Panel("gradient", "Gradient norm", (("grad_norm", ""),), 0),
    Panel("staleness", "Staleness: policy versions since the answer", (("staleness", ""),), 0),
    Panel(
        "latency",
        "Seconds",
        (("step_seconds", "per step"), ("latency_seconds", "from feedback to served weights")),
        0,
    ),
    Panel("samples", "Samples per step", (("opd_rl", "opd+rl"), ("opd", "opd"), ("rl", "rl")), 0, stacked=True),
)


def read_metrics(path: Path) -> Metrics:
    """All lines that can be read; none if there is no file. The last line may be half written."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return Metrics([], 0)
    written = [line for line in lines if line.strip()]
    steps = [step for step in map(read_step, written) if step]
    by_number = {step["step"]: step for step in steps}
    return Metrics([by_number[number] for number in sorted(by_number)], len(written) - len(steps))


def read_step(line: str) -> dict[str, float] | None:
    """The metrics of a step; None if the line is not one."""
    try:
        given = json.loads(line)
        kept = {name: float(value) for name, value in given.items() if name in METRICS and value is not None}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return kept if math.isfinite(kept.get("step", math.nan)) else None


def pictures(steps: Sequence[dict[str, float]]) -> list[Markup]:
    """A small chart for each panel that has data."""
    return [_picture(panel, steps) for panel in PANELS if any(_points(steps, name)[0] for name, _ in panel.lines)]


def _points(steps: Sequence[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    pairs = [(step["step"], step[name]) for step in steps if math.isfinite(step.get(name, math.nan))]
    return [x for x, _ in pairs], [y for _, y in pairs]


def _picture(panel: Panel, steps: Sequence[dict[str, float]]) -> Markup:
    from matplotlib.lines import Line2D

    figure = charts.new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    charts.dress(axes, panel.title, "step")
    last_values, below = [], dict.fromkeys((step["step"] for step in steps), 0.0)
    for colour, (name, label) in zip(charts.SERIES, panel.lines, strict=False):
        x, y = _points(steps, name)
        if panel.stacked:
            axes.bar(x, y, bottom=[below[place] for place in x], color=colour, width=0.8, linewidth=0)
            below |= {place: below[place] + value for place, value in zip(x, y, strict=True)}
        else:
            # A single point would be no visible line.
            axes.plot(x, y, color=colour, linewidth=1.7, marker="o" if len(x) < MAX_DOTS else "", markersize=3)
        if y:
            last_values.append(f"{label or panel.title}, last {y[-1]:.3g}")
    axes.set_ylim(*_limits(panel, steps, axes.get_ylim()))
    charts.whole_numbers(axes.xaxis)
    if len(panel.lines) > 1:
        shown = zip(charts.SERIES, panel.lines, strict=False)
        charts.add_legend(figure, [Line2D([], [], color=colour, label=label) for colour, (_, label) in shown])
    return charts.to_svg(
        figure, f"step-{panel.name}", f"{panel.title}, over {len(steps)} steps: {'; '.join(last_values)}."
    )


def _limits(
    panel: Panel, steps: Sequence[dict[str, float]], own: tuple[float, float]
) -> tuple[float | None, float | None]:
    """The ends of the axis: those of the panel, or further where values are, as rewards of episodes may be."""
    values = [y for name, _ in panel.lines for y in _points(steps, name)[1]]
    lowest = None if panel.lowest is None else min(panel.lowest, *values)
    return lowest, max(panel.highest, *values) if panel.highest else _top(own)


def _top(limits: tuple[float, float]) -> float:
    """The upper end of the axis, above 0 also where all values are 0."""
    low, high = limits
    return high if high > max(low, 0.0) else 1.0

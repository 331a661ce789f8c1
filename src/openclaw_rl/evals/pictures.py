"""The demo's picture: the share of held-out questions answered as wanted, over the course of the demo.

Each persona has a row of two panels, over minutes and over sessions, with a line for each method. For several seeds the
line is their mean, with a band from the worst to the best; a seed that ended early keeps its last value. For one seed,
error bars show the 95% interval.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from openclaw_rl.dashboard.components import charts
from openclaw_rl.evals.summary import exams, grouped, in_order, is_adherent, marks, summarise
from openclaw_rl.evals.trial import Exam, TrialOutcome
from openclaw_rl.lab.statistics import proportion_of_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW_HEIGHT = 9.6, 3.5
DASHES = (0, (4, 3))
Y_LABEL = "unseen questions answered as wanted"

X = Callable[[Exam], float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A method's line in a panel."""

    x: list[float]
    adherence: list[float]
    low: list[float]
    high: list[float]
    quality: list[float]
    seeds: int


def curve(group: Sequence[TrialOutcome], x: X) -> Curve | None:
    """One line for all seeds of a method; None if there was no examination."""
    lines = [line for line in ({x(exam): exam for exam in exams(outcome)} for outcome in group) if line]
    if not lines:
        return None
    places = sorted({place for line in lines for place in line})
    adherence = np.array([_at(places, line, lambda exam: exam.adherence) for line in lines])
    quality = np.array([_at(places, line, quality_of) for line in lines])
    low, high = adherence.min(0), adherence.max(0)
    if len(lines) == 1:
        intervals = [proportion_of_trials([marks(lines[0][place], is_adherent)]) for place in places]
        low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
    return Curve(places, adherence.mean(0).tolist(), low.tolist(), high.tolist(), quality.mean(0).tolist(), len(lines))


def _at(places: Sequence[float], line: dict[float, Exam], value: Callable[[Exam], float]) -> list[float]:
    """A seed's values at all places where any seed was examined, interpolated."""
    known = sorted(line)
    values: list[float] = np.interp(places, known, [value(line[place]) for place in known]).tolist()
    return values


def quality_of(exam: Exam) -> float:
    """The share of answers that pass the quality guard."""
    return sum(not answer.faults for answer in exam.answers) / len(exam.answers)


def save_curve(outcomes: Sequence[TrialOutcome], path_png: Path) -> None:
    """Raises UserError without Matplotlib, or if the file cannot be written."""
    charts.save_png(_figure(outcomes), path_png)


def curve_svg(outcomes: Sequence[TrialOutcome]) -> Markup:
    """The picture for a page. Raises UserError without Matplotlib."""
    return charts.to_svg(_figure(outcomes), "curve", describe(outcomes))


def describe(outcomes: Sequence[TrialOutcome]) -> str:
    """A description of the picture in words."""
    lines = [
        f"{summary.method} with {summary.persona} from {summary.before.mean:.0%} to {summary.after.mean:.0%}"
        for summary in summarise(outcomes)
        if summary.before and summary.after
    ]
    return f"Adherence on held-out questions, over minutes and over sessions: {'; '.join(lines)}."


def _figure(outcomes: Sequence[TrialOutcome]) -> "Figure":
    groups = grouped(outcomes)
    personas = list(dict.fromkeys(persona for persona, _ in groups)) or [""]
    methods = in_order(method for _, method in groups)
    figure = charts.new_figure(WIDTH, ROW_HEIGHT * len(personas) + 0.45)
    panels = figure.subplots(len(personas), 2, squeeze=False, sharey=True)
    several = len(personas) > 1
    for row, persona in zip(panels, personas, strict=True):
        where = f"{charts.plain(persona)}: " if several else ""
        for axes, name, x in zip(row, ("minutes", "sessions"), (_minutes, _sessions), strict=True):
            lines = [curve(groups.get((persona, method), ()), x) for method in methods]
            charts.dress(axes, f"{where}over {name}", name, Y_LABEL if axes is row[0] else "")
            _scale(axes, lines)
            for number, line in enumerate(lines):
                if line is not None:
                    _draw(axes, line, number)
            if not any(lines):
                axes.text(0.5, 0.5, "no examination yet", transform=axes.transAxes, ha="center", color=charts.FAINT)
    _legend(figure, methods, max((len(group) for group in groups.values()), default=1))
    return figure


def _minutes(exam: Exam) -> float:
    return exam.seconds / 60


def _sessions(exam: Exam) -> float:
    return exam.sessions


def _scale(axes: "Axes", lines: Sequence[Curve | None]) -> None:
    end = max((line.x[-1] for line in lines if line), default=1.0) or 1.0
    axes.set_xlim(-0.02 * end, 1.02 * end)
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])


def _draw(axes: "Axes", line: Curve, number: int) -> None:
    colour = _colour(number)
    axes.plot(line.x, line.quality, color=colour, linewidth=1, linestyle=DASHES, alpha=0.75)
    # Dots mark examinations. The mean of several seeds has mostly interpolated points, so it has no dots.
    dot = "o" if line.seeds == 1 else ""
    axes.plot(line.x, line.adherence, color=colour, linewidth=2.2, marker=dot, markersize=4.5)
    if line.seeds > 1:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
        return
    below = [mean - low for mean, low in zip(line.adherence, line.low, strict=True)]
    above = [high - mean for mean, high in zip(line.adherence, line.high, strict=True)]
    axes.errorbar(line.x, line.adherence, [below, above], fmt="none", ecolor=colour, elinewidth=1.1, alpha=0.45)


def _colour(number: int) -> str:
    return charts.SERIES[number % len(charts.SERIES)]


def _legend(figure: "Figure", methods: Sequence[str], seeds: int) -> None:
    """The legend, below the panels so that it never covers data."""
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Line2D([], [], color=_colour(n), linewidth=2.2, label=charts.plain(method)) for n, method in enumerate(methods)
    ]
    guard = "pass the quality guard"
    handles.append(Line2D([], [], color=charts.FAINT, linewidth=1, linestyle=DASHES, label=guard))
    if seeds > 1:
        handles.append(Patch(color=charts.FAINT, alpha=0.16, linewidth=0, label=f"worst to best of {seeds} seeds"))
    else:
        handles.append(Line2D([], [], color=charts.FAINT, linewidth=0, marker="|", markersize=9, label="95 % interval"))
    charts.add_legend(figure, handles)

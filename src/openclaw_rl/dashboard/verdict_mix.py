"""Verdicts over time: good, neutral, bad or none, by source, and the share with a hint."""

from collections import Counter
from collections.abc import Callable, Sequence

from markupsafe import Markup

from openclaw_rl.dashboard.components import charts
from openclaw_rl.types import Sign, Source, VerdictSummary

COLOURS = dict(zip(Sign, (charts.GOOD, charts.NEUTRAL, charts.BAD, charts.SILENT), strict=True))
#: The label of verdicts without a source.
NOT_JUDGED = "Not judged"
#: Bars in a picture, at most.
BARS = 24
WIDTH, HEIGHT = 4.6, 2.5


def portions(verdicts: Sequence[VerdictSummary]) -> list[Sequence[VerdictSummary]]:
    """The verdicts in at most `BARS` groups of one size; the last may be smaller."""
    size = max(1, -(-len(verdicts) // BARS))
    return [verdicts[start : start + size] for start in range(0, len(verdicts), size)]


def pictures(verdicts: Sequence[VerdictSummary]) -> list[Markup]:
    """All verdicts, those of each source if there are several, and the share that came with a hint."""
    if not verdicts:
        return []
    made = [_mix(verdicts, "all", "Verdicts", lambda _: True)]
    sources = [source for source, _ in Counter(verdict.source for verdict in verdicts).most_common()]
    if len(sources) > 1:
        made += [
            _mix(verdicts, f"by-{n}", f"Verdicts by {source}" if source else NOT_JUDGED, _by(source))
            for n, source in enumerate(sources)
        ]
    return [*made, _hints(verdicts)]


def _by(source: Source | None) -> Callable[[VerdictSummary], bool]:
    return lambda verdict: verdict.source == source


def _mix(verdicts: Sequence[VerdictSummary], name: str, title: str, wanted: Callable[[VerdictSummary], bool]) -> Markup:
    """Stacked bars: the signs of those verdicts that are wanted, in each portion of all."""
    from matplotlib.patches import Patch

    parts = portions(verdicts)
    counts = [Counter(verdict.sign for verdict in part if wanted(verdict)) for part in parts]
    figure = charts.new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    size = len(parts[0])
    charts.dress(axes, charts.plain(title), "verdicts, in the order they were given")
    bottom = [0] * len(parts)
    for sign in Sign:
        heights = [count[sign] for count in counts]
        places = [size * (n + 0.5) for n in range(len(parts))]
        axes.bar(places, heights, width=0.84 * size, bottom=bottom, color=COLOURS[sign], linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlim(0, size * len(parts))
    axes.set_ylim(0, size)
    charts.whole_numbers(axes.xaxis, axes.yaxis)
    charts.add_legend(figure, [Patch(color=COLOURS[sign], label=sign) for sign in Sign])
    total: Counter[Sign] = sum(counts, Counter())
    summary = ", ".join(f"{total[sign]} {sign}" for sign in Sign)
    return charts.to_svg(figure, f"verdicts-{name}", f"{title} over time: {summary}.")


def _hints(verdicts: Sequence[VerdictSummary]) -> Markup:
    parts = portions(verdicts)
    shares = [sum(verdict.hints > 0 for verdict in part) / len(part) for part in parts]
    figure = charts.new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    charts.dress(axes, "Share of verdicts with a hint", "verdicts, in the order they were given")
    size = len(parts[0])
    axes.plot([size * (n + 0.5) for n in range(len(parts))], shares, color=charts.SERIES[0], marker="o", markersize=3)
    axes.set_xlim(0, size * len(parts))
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    charts.whole_numbers(axes.xaxis)
    share = sum(verdict.hints > 0 for verdict in verdicts) / len(verdicts)
    return charts.to_svg(figure, "verdicts-hints", f"Share of verdicts with a hint over time: {share:.0%} of all.")

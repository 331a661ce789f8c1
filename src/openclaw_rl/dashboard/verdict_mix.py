"""What was thought of turns, over time: good, neutral, bad or nothing; by whom; and how often with a hint."""

import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from openclaw_rl.dashboard.components import charts

SIGNS = ("good", "neutral", "bad", "abstained")
COLOURS = dict(zip(SIGNS, (charts.GOOD, charts.NEUTRAL, charts.BAD, charts.SILENT), strict=True))
#: A verdict that names nobody.
NOBODY = "nobody"
#: Bars in a picture, at most.
BARS = 24
WIDTH, HEIGHT = 4.6, 2.5


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict in short."""

    score: float | None
    source: str
    hinted: bool

    @property
    def sign(self) -> str:
        if self.score is None:
            return "abstained"
        return "good" if self.score > 0 else "bad" if self.score < 0 else "neutral"


def read_verdicts(db: sqlite3.Connection) -> list[Judged]:
    """All verdicts, in the order they were given."""
    rows = db.execute(
        "SELECT v.score, v.source, EXISTS (SELECT 1 FROM hints h WHERE h.turn = v.turn) AS hinted "
        "FROM verdicts v ORDER BY v.number"
    )
    return [Judged(row["score"], row["source"] or NOBODY, bool(row["hinted"])) for row in rows]


def by_source(verdicts: Sequence[Judged]) -> dict[str, Counter[str]]:
    """How often each judge said what, and how often with a hint; the busiest first."""
    sources = [source for source, _ in Counter(verdict.source for verdict in verdicts).most_common()]
    found: dict[str, Counter[str]] = {source: Counter() for source in sources}
    for verdict in verdicts:
        found[verdict.source].update([verdict.sign, *(["hinted"] if verdict.hinted else [])])
    return found


def portions(verdicts: Sequence[Judged]) -> list[Sequence[Judged]]:
    """As many as there are bars, all as large but the last."""
    size = max(1, -(-len(verdicts) // BARS))
    return [verdicts[start : start + size] for start in range(0, len(verdicts), size)]


def pictures(verdicts: Sequence[Judged]) -> list[Markup]:
    """All verdicts, those of each judge if there are several, and how many came with a hint."""
    if not verdicts:
        return []
    sources = list(by_source(verdicts))
    found = [_mix(verdicts, "all", "Verdicts", lambda _: True)]
    if len(sources) > 1:
        found += [_mix(verdicts, f"by-{n}", f"Verdicts by {source}", _by(source)) for n, source in enumerate(sources)]
    return [*found, _hints(verdicts)]


def _by(source: str) -> Callable[[Judged], bool]:
    return lambda verdict: verdict.source == source


def _mix(verdicts: Sequence[Judged], name: str, title: str, wanted: Callable[[Judged], bool]) -> Markup:
    """Stacked bars along all verdicts, of those that are wanted."""
    from matplotlib.patches import Patch

    parts = portions(verdicts)
    counts = [Counter(verdict.sign for verdict in part if wanted(verdict)) for part in parts]
    figure = charts.new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    size = len(parts[0])
    charts.dress(axes, charts.plain(title), "verdicts, in the order they were given")
    bottom = [0] * len(parts)
    for sign in SIGNS:
        heights = [count[sign] for count in counts]
        places = [size * (n + 0.5) for n in range(len(parts))]
        axes.bar(places, heights, width=0.84 * size, bottom=bottom, color=COLOURS[sign], linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xlim(0, size * len(parts))
    axes.set_ylim(0, size)
    charts.whole_numbers(axes.xaxis, axes.yaxis)
    charts.add_legend(figure, [Patch(color=COLOURS[sign], label=sign) for sign in SIGNS])
    total: Counter[str] = sum(counts, Counter())
    said = ", ".join(f"{total[sign]} {sign}" for sign in SIGNS)
    return charts.to_svg(figure, f"verdicts-{name}", f"{title} over time: {said}.")


def _hints(verdicts: Sequence[Judged]) -> Markup:
    parts = portions(verdicts)
    shares = [sum(verdict.hinted for verdict in part) / len(part) for part in parts]
    figure = charts.new_figure(WIDTH, HEIGHT)
    axes = figure.add_subplot()
    charts.dress(axes, "Share of verdicts with a hint", "verdicts, in the order they were given")
    size = len(parts[0])
    axes.plot([size * (n + 0.5) for n in range(len(parts))], shares, color=charts.SERIES[0], marker="o", markersize=3)
    axes.set_xlim(0, size * len(parts))
    axes.set_ylim(-0.02, 1.02)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
    charts.whole_numbers(axes.xaxis)
    share = sum(verdict.hinted for verdict in verdicts) / len(verdicts)
    return charts.to_svg(figure, "verdicts-hints", f"Share of verdicts with a hint over time: {share:.0%} of all.")

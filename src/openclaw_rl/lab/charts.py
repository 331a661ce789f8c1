"""Charts as SVG: in a page, in the colours of its style sheet, or together in a file.

The same numbers give the same text every time. Charts have no inline styles, which a page may forbid.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeVar

from markupsafe import Markup

from openclaw_rl.ledger.packing import whole_text

#: The colours of pages, and the look of charts.
STYLE = Path(__file__).parent / "charts.css"
LEFT, RIGHT, TOP = 44, 12, 10
#: Up to this many points, each has a dot that names its numbers.
MAX_DOTS = 60
#: Longer lines are thinned to about this many points.
MAX_POINTS = 400
MAX_BARS = 100
#: The style sheet has so many colours of lines.
COLOURS = 6
#: In a file: the space around charts, the height of a line of text, and the width of a letter in the legend.
MARGIN, TEXT_LINE, LETTER = 16, 24, 6.6

#: In a table of bars: the widths of names, of a column and of a bar, and the height of a row.
NAMES, CELL, BAR, ROW = 210, 122, 106, 38

Point = tuple[float, float]
Row = TypeVar("Row", bound=tuple[float, ...])
Form = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart, or a layer of its bars."""

    label: str
    points: Sequence[Point]
    style: str
    """A class of the style sheet: s0 to s5, good, neutral, bad, silent."""
    band: Sequence[tuple[float, float, float]] = ()
    """(place, low, high): around the line, or as whiskers of points that no line joins."""
    drawn: Literal["line", "line without dots", "dashed", "points"] = "line"


@dataclass(frozen=True, slots=True)
class Canvas:
    """The size of a chart, and how many lines its grid has at most."""

    width: int
    height: int
    bottom: int
    ticks: int


SMALL = Canvas(360, 170, 24, 4)
#: With a name below the axis.
LARGE = Canvas(460, 280, 42, 5)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its title and legend, which the page sets as text."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """(style, label). Besides the styles of series there are `dashed` and `band`."""
    canvas: Canvas = SMALL


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the numbers of a chart are on its canvas."""

    canvas: Canvas
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.canvas.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        bottom = self.canvas.height - self.canvas.bottom
        return bottom - (value - self.y_low) / (self.y_high - self.y_low) * (bottom - TOP)

    def places(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def number(value: float) -> str:
    """A number as short as it can be read."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", "\u2009")


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "step",
    axis: str = "",
    lowest: float | None = None,
    highest: float | None = None,
    form: Form = number,
) -> Chart:
    """Lines over `unit`. `lowest` and `highest` are the ends of the axis, unless values lie beyond them.

    `axis` is written below the axis of a large chart. Without it, the chart is small.
    """
    shown = [replace(one, points=thinned(finite(one.points)), band=thinned(finite(one.band))) for one in series]
    shown = [one for one in shown if one.points]
    values = [y for one in shown for _, y in one.points] + [y for one in shown for _, *ends in one.band for y in ends]
    canvas = LARGE if axis else SMALL
    frame = frame_of(canvas, [x for one in shown for x, _ in one.points], values, lowest, highest)
    # No band covers a line.
    bands = [draw_band(frame, one) for one in shown if one.band]
    parts = [grid(frame, form, axis), *bands, *(draw_line(frame, one, unit, form) for one in shown)]
    if not shown:
        middle = (canvas.width / 2, canvas.height / 2)
        parts.append(Markup('<text x="{}" y="{}">nothing measured yet</text>').format(*middle))
    changes = "; ".join(f"{one.label or title}, {change(one, form)}" for one in shown)
    return finish(canvas, title, shown, parts, f"{title}, over {counted(shown)}: {changes}.")


def draw_band(frame: Frame, series: Series) -> Markup:
    """A band around a line, or the whiskers of points."""
    if series.drawn != "points":
        edge = [(x, low) for x, low, _ in series.band] + [(x, high) for x, _, high in reversed(series.band)]
        return Markup('<polygon class="{}" points="{}"/>').format(series.style, frame.places(edge))
    whiskers = [[(x, low), (x, high)] for x, low, high in series.band]
    return Markup("").join(polyline(frame, series.style, whisker) for whisker in whiskers)


def draw_line(frame: Frame, series: Series, unit: str, form: Form) -> Markup:
    parts = []
    if series.drawn != "points":
        style = f"{series.style} dashed" if series.drawn == "dashed" else series.style
        parts.append(polyline(frame, style, series.points))
    # A single point would be no visible line.
    if series.drawn in ("line", "points") and len(series.points) <= MAX_DOTS:
        parts += [dot(frame, series, x, y, unit, form) for x, y in series.points]
    return Markup("").join(parts)


def polyline(frame: Frame, style: str, points: Sequence[Point]) -> Markup:
    return Markup('<polyline class="{}" points="{}"/>').format(style, frame.places(points))


def change(series: Series, form: Form) -> str:
    """The first and the last value of a line."""
    first = form(series.points[0][1])
    last = form(series.points[-1][1])
    return last if len(series.points) == 1 else f"from {first} to {last}"


def counted(series: Sequence[Series]) -> str:
    count = max((len(one.points) for one in series), default=0)
    return "1 point" if count == 1 else f"{count} points"


def bar_chart(title: str, layers: Sequence[Series], *, summary: str, whole: float | None = None) -> Chart:
    """Stacked bars. All layers have the same places; `whole` is the height of the axis. Many bars are thinned."""
    layers = [replace(one, points=thinned(list(one.points), MAX_BARS)) for one in layers]
    places = sorted({x for layer in layers for x, _ in layer.points})
    heights = {place: sum(y for layer in layers for x, y in layer.points if x == place) for place in places}
    gap = min((b - a for a, b in pairwise(places)), default=1.0)
    ends = [places[0] - gap / 2, places[-1] + gap / 2] if places else [0.0, 1.0]
    frame = frame_of(SMALL, ends, [0.0, whole or max(heights.values(), default=1.0)], 0.0, whole)
    parts = [grid(frame, number)]
    below = dict.fromkeys(places, 0.0)
    width = 0.8 * (frame.x(ends[0] + gap) - frame.x(ends[0]))
    for layer in layers:
        for x, y in layer.points:
            if y <= 0:
                continue
            top = frame.y(below[x] + y)
            tip = f"{layer.label} {number(y)}" if layer.label else number(y)
            parts.append(bar(layer.style, frame.x(x) - width / 2, top, width, frame.y(below[x]) - top, tip))
            below[x] += y
    return finish(SMALL, title, layers, parts, f"{title}: {summary}.")


def bar_table(
    title: str, columns: Mapping[str, str], rows: Mapping[tuple[str, str], Mapping[str, tuple[float, float, float]]]
) -> Chart:
    """A bar from 0 to 1 and its interval (mean, low, high) for each row and column. Each has a name and a few words."""
    # A title needs room above a single column, too.
    canvas = Canvas(NAMES + CELL * max(3, len(columns)), ROW * (len(rows) + 1), 0, 0)
    parts = []
    for place, (name, words) in enumerate(columns.items()):
        parts += two_lines(NAMES + CELL * place, 0, name, words)
    for line, ((name, words), cells) in enumerate(rows.items(), 1):
        parts += two_lines(0, ROW * line, name, words)
        for place, column in enumerate(columns):
            parts += table_cell(NAMES + CELL * place, ROW * line, cells.get(column), f"{name}, {column}: ")
    said = "; ".join(
        f"{name}: {', '.join(f'{column} {share(cell[0])}' for column, cell in cells.items())}"
        for (name, _), cells in rows.items()
    )
    return finish(canvas, title, [], parts, f"{title}. {said}.")


def two_lines(x: float, y: float, name: str, words: str) -> list[Markup]:
    return [
        Markup('<text class="title" x="{}" y="{}">{}</text>').format(x, y + 14, name),
        Markup('<text class="small" x="{}" y="{}">{}</text>').format(x, y + 28, words),
    ]


def table_cell(x: float, y: float, cell: tuple[float, float, float] | None, tip: str) -> list[Markup]:
    """A share as a number and a bar, with its interval as a line."""
    if cell is None:
        return [Markup('<text class="small" x="{}" y="{}">no score</text>').format(x, y + 14)]
    mean, low, high = cell
    ends = f"{x + BAR * low:.1f},{y + 23} {x + BAR * high:.1f},{y + 23}"
    return [
        Markup('<text class="label" x="{}" y="{}">{}</text>').format(x, y + 14, share(mean)),
        bar("silent", x, y + 19, BAR, 8, f"{tip}{share(mean)} ({share(low)} – {share(high)})"),
        bar("s0", x, y + 19, BAR * mean, 8, f"{tip}{share(mean)}"),
        Markup('<polyline class="interval" points="{}"/>').format(ends),
    ]


def bar(style: str, x: float, y: float, width: float, height: float, tip: str) -> Markup:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return Markup('<rect class="{}" {}><title>{}</title></rect>').format(style, Markup(shape), tip)


def finish(canvas: Canvas, title: str, series: Sequence[Series], parts: Sequence[Markup], description: str) -> Chart:
    svg = Markup('<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>').format(
        description, canvas.width, canvas.height, Markup("").join(parts)
    )
    legend = tuple((one.style, one.label) for one in series) if len(series) > 1 else ()
    return Chart(title, svg, legend, canvas)


def frame_of(
    canvas: Canvas, xs: Sequence[float], ys: Sequence[float], lowest: float | None, highest: float | None
) -> Frame:
    x_low = min(xs, default=0.0)
    x_high = max(xs, default=1.0)
    if x_low == x_high:
        x_low = x_low - 0.5
        x_high = x_high + 0.5
    y_low = min([*ys, *([] if lowest is None else [lowest])], default=0.0)
    y_high = max([*ys, *([] if highest is None else [highest])], default=1.0)
    if y_low == y_high:
        # Half of a large number, because one more would be the same number.
        half = max(0.5, abs(y_low) / 2)
        y_low = y_low if lowest is not None else y_low - half
        y_high = y_high + half
    room = 0.06 * (y_high - y_low)
    y_low -= 0.0 if lowest is not None else room
    y_high += 0.0 if highest else room
    return Frame(canvas, x_low, x_high, y_low, y_high)


def grid(frame: Frame, form: Form, axis: str = "") -> Markup:
    """Lines and numbers of both axes, and the name of the horizontal one."""
    canvas = frame.canvas
    lines = [rule(frame, frame.y(tick), form(tick)) for tick in ticks(frame.y_low, frame.y_high, canvas.ticks)]
    below = canvas.height - canvas.bottom + 18
    places = [
        Markup('<text x="{:.1f}" y="{}">{}</text>').format(frame.x(tick), below, number(tick))
        for tick in ticks(frame.x_low, frame.x_high, canvas.ticks, whole=True)
    ]
    if axis:
        middle = (LEFT + canvas.width - RIGHT) / 2
        places.append(Markup('<text x="{}" y="{}">{}</text>').format(middle, canvas.height - 6, axis))
    return Markup("").join([*lines, *places])


def rule(frame: Frame, y: float, label: str) -> Markup:
    end = frame.canvas.width - RIGHT
    line = Markup('<line class="rule" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>').format(LEFT, end, y)
    return line + Markup('<text class="y" x="{}" y="{:.1f}">{}</text>').format(LEFT - 6, y + 3.5, label)


def dot(frame: Frame, series: Series, x: float, y: float, unit: str, form: Form) -> Markup:
    tip = " ".join(filter(None, [f"{unit} {number(x)}:", series.label, form(y)]))
    return Markup('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="2.4"><title>{}</title></circle>').format(
        series.style, frame.x(x), frame.y(y), tip
    )


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Round numbers in a range, at most `most` and one."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    # Rounding must not take the next larger step.
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= rough - 1e-9 * power), power * 10)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def finite(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if all(map(math.isfinite, row))]


def thinned(rows: list[Row], most: int = MAX_POINTS) -> list[Row]:
    """Every n-th row, so that there are about `most`, the last among them."""
    step = max(1, len(rows) // most)
    return rows[:-1][::step] + rows[-1:]


def chart_file(heading: str, charts: Sequence[Chart], columns: int = 1) -> str:
    """Charts of one size as the text of an SVG file, in rows, above one legend for all of them.

    It is light or dark as whoever looks at it prefers, and fetches nothing.
    """
    size = charts[0].canvas
    cell_width = size.width + MARGIN
    cell_height = size.height + TEXT_LINE
    width = columns * cell_width + MARGIN
    parts = [Markup('<text class="heading" x="{}" y="{}">{}</text>').format(MARGIN, MARGIN + 12, heading)]
    for place, chart in enumerate(charts):
        x = MARGIN + place % columns * cell_width
        y = MARGIN + TEXT_LINE + place // columns * cell_height
        parts.append(Markup('<text class="title" x="{}" y="{}">{}</text>').format(x, y + 14, chart.title))
        shape = Markup(f'x="{x}" y="{y + TEXT_LINE}" width="{size.width}" height="{size.height}"')
        parts.append(Markup("<svg {}>{}</svg>").format(shape, chart.svg))
    below = MARGIN + TEXT_LINE + -(-len(charts) // columns) * cell_height
    keys, height = legend_of(charts, width, below)
    svg = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="{0}" height="{1}" viewBox="0 0 {0} {1}">'
        '<style>{2}</style><rect class="paper" width="{0}" height="{1}"/>{3}<g class="legend">{4}</g></svg>\n'
    ).format(width, height, Markup(style_with_colours()), Markup("").join(parts), keys)
    return whole_text(svg)


def legend_of(charts: Sequence[Chart], width: int, top: float) -> tuple[Markup, float]:
    """The entries of all legends, each once, from `top` on; and where they end."""
    parts = []
    x: float = MARGIN
    y = top
    for style, label in dict.fromkeys(entry for chart in charts for entry in chart.legend):
        needed = 16 + LETTER * len(label) + MARGIN
        if x > MARGIN and x + needed > width:
            x = MARGIN
            y += TEXT_LINE
        parts.append(key(style, x, y + 3))
        parts.append(Markup('<text class="label" x="{:.1f}" y="{}">{}</text>').format(x + 16, y + 13, label))
        x += needed
    return Markup("").join(parts), y + (TEXT_LINE if parts else 0) + MARGIN / 2


def key(style: str, x: float, y: float) -> Markup:
    """What a series looks like, in a legend."""
    if style == "dashed":
        return Markup('<polyline class="dashed" points="{0:.1f},{2} {1:.1f},{2}"/>').format(x - 2, x + 12, y + 6)
    return Markup('<rect class="{}" x="{:.1f}" y="{}" width="11" height="11" rx="3"/>').format(style, x, y)


def style_with_colours() -> str:
    """The style sheet with its colours written out, because many programs that show SVG know no variables."""
    colours, rules = STYLE.read_text("utf-8").split("/* Charts */")
    light, dark = (dict(re.findall(r"(--[\w-]+): ([^;]+);", part)) for part in colours.split("@media"))
    in_light = _coloured(rules, light)
    in_dark = _coloured(rules, light | dark)
    return f"{in_light}@media (prefers-color-scheme: dark) {{{in_dark}}}"


def _coloured(rules: str, colours: Mapping[str, str]) -> str:
    return re.sub(r"var\((--[\w-]+)\)", lambda found: colours[found[1]], rules)

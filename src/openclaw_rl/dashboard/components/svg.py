"""Small charts as SVG, in the colours of the page's style sheet. They have no inline styles, which the page forbids."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

WIDTH, HEIGHT = 360, 170
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 10, 24
#: Up to this many points, each has a dot that names its numbers.
MAX_DOTS = 60
#: Longer lines are thinned to about this many points.
MAX_POINTS = 400
MAX_BARS = 100
#: How many lines the grid has, at most.
MAX_TICKS = 4

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart, or a layer of its bars."""

    label: str
    points: Sequence[Point]
    style: str
    """A class of the style sheet: s0 to s5, good, neutral, bad, silent."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with its title and legend, which the page sets as text."""

    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """(style, label)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the numbers of a chart are on its canvas."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "step",
    lowest: float | None = None,
    highest: float | None = None,
    form: Callable[[float], str] | None = None,
) -> Chart:
    """Lines over `unit`. `lowest` and `highest` are the ends of the axis, unless values lie beyond them."""
    form = form or number
    shown = [Series(one.label, thinned(finite(one.points)), one.style) for one in series]
    shown = [one for one in shown if one.points]
    values = [y for one in shown for _, y in one.points]
    frame = frame_of([x for one in shown for x, _ in one.points], values, lowest, highest)
    parts = [grid(frame, form)]
    for one in shown:
        places = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in one.points)
        parts.append(Markup('<polyline class="line {}" points="{}"/>').format(one.style, places))
        # A single point would be no visible line.
        if len(one.points) <= MAX_DOTS:
            parts += [dot(frame, one, x, y, unit, form) for x, y in one.points]
    last = [f"{one.label or title}, last {form(one.points[-1][1])}" for one in shown]
    return finish(title, shown, parts, f"{title}, over {counted(shown)}: {'; '.join(last)}.")


def counted(series: Sequence[Series]) -> str:
    count = max((len(one.points) for one in series), default=0)
    return "1 point" if count == 1 else f"{count} points"


def bar_chart(title: str, layers: Sequence[Series], *, summary: str, whole: float | None = None) -> Chart:
    """Stacked bars. All layers have the same places; `whole` is the height of the axis. Many bars are thinned."""
    layers = [Series(one.label, thinned(list(one.points), MAX_BARS), one.style) for one in layers]
    places = sorted({x for layer in layers for x, _ in layer.points})
    heights = {place: sum(y for layer in layers for x, y in layer.points if x == place) for place in places}
    gap = min((b - a for a, b in pairwise(places)), default=1.0)
    ends = [places[0] - gap / 2, places[-1] + gap / 2] if places else [0.0, 1.0]
    frame = frame_of(ends, [0.0, whole or max(heights.values(), default=1.0)], 0.0, whole)
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
    return finish(title, layers, parts, f"{title}: {summary}.")


def bar(style: str, x: float, y: float, width: float, height: float, tip: str) -> Markup:
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return Markup('<rect class="{}" {}><title>{}</title></rect>').format(style, Markup(shape), tip)


def finish(title: str, series: Sequence[Series], parts: Sequence[Markup], description: str) -> Chart:
    svg = Markup('<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>').format(
        description, WIDTH, HEIGHT, Markup("").join(parts)
    )
    legend = tuple((one.style, one.label) for one in series) if len(series) > 1 else ()
    return Chart(title, svg, legend)


def frame_of(xs: Sequence[float], ys: Sequence[float], lowest: float | None, highest: float | None) -> Frame:
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
    return Frame(x_low, x_high, y_low - (0.0 if lowest is not None else room), y_high + (0.0 if highest else room))


def grid(frame: Frame, form: Callable[[float], str]) -> Markup:
    """Lines and numbers of both axes."""
    lines = [rule(frame.y(tick), form(tick)) for tick in ticks(frame.y_low, frame.y_high)]
    places = [
        Markup('<text class="tick x" x="{:.1f}" y="{}">{}</text>').format(frame.x(tick), HEIGHT - 6, number(tick))
        for tick in ticks(frame.x_low, frame.x_high, whole=True)
    ]
    return Markup("").join([*lines, *places])


def rule(y: float, label: str) -> Markup:
    line = Markup('<line class="rule" x1="{0}" x2="{1}" y1="{2:.1f}" y2="{2:.1f}"/>').format(LEFT, WIDTH - RIGHT, y)
    return line + Markup('<text class="tick y" x="{}" y="{:.1f}">{}</text>').format(LEFT - 6, y + 3.5, label)


def dot(frame: Frame, series: Series, x: float, y: float, unit: str, form: Callable[[float], str]) -> Markup:
    tip = " ".join(filter(None, [f"{unit} {number(x)}:", series.label, form(y)]))
    return Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="2.4"><title>{}</title></circle>').format(
        series.style, frame.x(x), frame.y(y), tip
    )


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Round numbers in a range, at most `MAX_TICKS` and one."""
    rough = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= rough), power * 10)
    if whole:
        step = max(1.0, round(step))
    first = math.ceil(low / step - 1e-9)
    return [round(count * step, 12) for count in range(first, math.floor(high / step + 1e-9) + 1)]


def finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def thinned(points: list[Point], most: int = MAX_POINTS) -> list[Point]:
    """Every n-th point, so that there are about `most`, the last among them."""
    step = max(1, len(points) // most)
    return points[:-1][::step] + points[-1:]


def number(value: float) -> str:
    """A number as short as it can be read."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", "\u2009")


def share(value: float) -> str:
    return f"{100 * value:.0f} %"

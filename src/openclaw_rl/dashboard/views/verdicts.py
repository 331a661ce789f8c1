"""Verdicts over time: good, neutral, bad or none, by source, and the share with a hint."""

from collections import Counter
from collections.abc import Callable, Sequence

from openclaw_rl.dashboard.components.svg import Chart, Series, bar_chart, line_chart, share
from openclaw_rl.types import Sign, Source, VerdictSummary

STYLES = dict(zip(Sign, ("good", "neutral", "bad", "silent"), strict=True))
#: The label of verdicts without a source.
NOT_JUDGED = "Not judged"
#: Bars in a chart, at most.
BARS = 24


def portions(verdicts: Sequence[VerdictSummary]) -> list[Sequence[VerdictSummary]]:
    """The verdicts in at most `BARS` groups of one size; the last may be smaller."""
    size = max(1, -(-len(verdicts) // BARS))
    return [verdicts[start : start + size] for start in range(0, len(verdicts), size)]


def verdict_charts(verdicts: Sequence[VerdictSummary]) -> list[Chart]:
    """All verdicts, those of each source if there are several, and the share that came with a hint."""
    if not verdicts:
        return []
    made = [mix(verdicts, "Verdicts", lambda _: True)]
    sources = [source for source, _ in Counter(verdict.source for verdict in verdicts).most_common()]
    if len(sources) > 1:
        made += [mix(verdicts, f"Verdicts by {source}" if source else NOT_JUDGED, by(source)) for source in sources]
    return [*made, hints(verdicts)]


def by(source: Source | None) -> Callable[[VerdictSummary], bool]:
    return lambda verdict: verdict.source == source


def mix(verdicts: Sequence[VerdictSummary], title: str, wanted: Callable[[VerdictSummary], bool]) -> Chart:
    """Stacked bars: the signs of those verdicts that are wanted, in each portion of all."""
    parts = portions(verdicts)
    size = len(parts[0])
    counts = [Counter(verdict.sign for verdict in part if wanted(verdict)) for part in parts]
    layers = [
        Series(sign, [(size * (n + 0.5), count[sign]) for n, count in enumerate(counts)], STYLES[sign]) for sign in Sign
    ]
    total: Counter[Sign] = sum(counts, Counter())
    summary = "over time, " + ", ".join(f"{total[sign]} {sign}" for sign in Sign)
    return bar_chart(title, layers, summary=summary, whole=size)


def hints(verdicts: Sequence[VerdictSummary]) -> Chart:
    parts = portions(verdicts)
    size = len(parts[0])
    shares = [
        (size * (n + 0.5), sum(verdict.hints > 0 for verdict in part) / len(part)) for n, part in enumerate(parts)
    ]
    series = [Series("", shares, "s0")]
    return line_chart("Share of verdicts with a hint", series, unit="verdict", lowest=0, highest=1, form=share)

"""What was learned, as charts and tables: verdicts over time, rewards of environments, training steps."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.dashboard.evaluations import Evaluation
from openclaw_rl.lab.charts import COLOURS, Chart, Series, bar_chart, line_chart, number, share
from openclaw_rl.learn.reporting import MEAN_GAP
from openclaw_rl.types import EpisodePoint, Sign, Source, StepOutcome, UpdateCard, VerdictSummary

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


OUTCOMES = {
    StepOutcome.APPLIED: "kept",
    StepOutcome.UNDONE: "made again",
    StepOutcome.ROLLED_BACK: "rolled back",
    StepOutcome.QUARANTINED: "refused",
}


@dataclass(frozen=True, slots=True)
class Panel:
    """Some metrics over steps, in one chart."""

    title: str
    lines: tuple[tuple[str, str], ...]
    """(metric, label); a single line needs no label."""
    lowest: float | None = None
    """The lower end of the axis, if it is fixed."""
    highest: float | None = None
    stacked: bool = False
    """Stacked bars instead of lines."""
    is_share: bool = False


PANELS = (
    Panel("Mean score of a step's turns", (("reward", ""),), -1.0, 1.0),
    Panel("Mean reward of an episode", (("episode_reward", ""),)),
    Panel("Share of episodes that were solved", (("solved", ""),), 0, 1, is_share=True),
    Panel("Share of plain prompts answered sensibly", (("guard_sensible", ""),), 0, 1, is_share=True),
    Panel("Loss", (("loss", ""),)),
    Panel("Change in KL per token", (("kl_old", "to the previous policy"), ("kl_base", "to the base model")), 0),
    Panel("Share of clipped tokens", (("clip_fraction", ""),), 0, is_share=True),
    Panel("Gradient norm", (("grad_norm", ""),), 0),
    Panel("Policy versions between an answer and its step", (("staleness", ""),), 0),
    Panel("Seconds", (("step_seconds", "per step"), ("latency_seconds", "from feedback to served weights")), 0),
    Panel("How far sampler and learner are apart, in log-prob", ((MEAN_GAP, ""),), 0),
    Panel(
        "Turns of a step, by what they teach with",
        (("opd_rl", "score and hint"), ("opd", "hint"), ("rl", "score"), ("notes", "note"), ("practice", "practice")),
        0,
        stacked=True,
    ),
)
#: The columns of the table: heading, metric, format.
COLUMNS = (
    ("Mean score", "reward", "{:+.2f}"),
    ("Loss", "loss", "{:.3g}"),
    ("Change", "kl_old", "{:.4f}"),
    ("Seconds", "step_seconds", "{:.1f}"),
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step in the table."""

    update: UpdateCard
    cells: tuple[str, ...]

    @property
    def outcome_words(self) -> str:
        return OUTCOMES[self.update.outcome]

    @property
    def counts(self) -> bool:
        return self.update.outcome is StepOutcome.APPLIED


def step_row(update: UpdateCard) -> StepRow:
    return StepRow(update, tuple(cell(update.metrics, name, form) for _, name, form in COLUMNS))


def cell(metrics: Mapping[str, Any], name: str, form: str) -> str:
    value = metrics.get(name)
    return form.format(value) if isinstance(value, int | float) and math.isfinite(value) else ""


def step_charts(steps: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """A small chart for each panel that has data."""
    return [draw(panel, steps) for panel in PANELS if any(points(steps, name) for name, _ in panel.lines)]


def evaluation_charts(evaluations: Sequence[Evaluation]) -> list[Chart]:
    """Adherence where evaluations ran: the share of cases that each policy passed. The last one of a policy counts."""
    shares: dict[str, dict[int, float]] = {}
    for evaluation in evaluations:
        shares.setdefault(evaluation.what, {})[evaluation.version] = evaluation.share
    if not shares:
        return []
    series = [
        Series(what, [(float(version), passed) for version, passed in sorted(measured.items())], f"s{place}")
        for place, (what, measured) in enumerate(list(shares.items())[:COLOURS])
    ]
    only = f" ({series[0].label})" if len(series) == 1 else ""
    title = f"Adherence: share of unseen cases answered as wanted{only}"
    return [line_chart(title, series, unit="policy", lowest=0, highest=1, form=share)]


def points(steps: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    pairs = [(step["step"], step.get(name)) for step in steps]
    return [(float(x), float(y)) for x, y in pairs if isinstance(y, int | float) and math.isfinite(y)]


def draw(panel: Panel, steps: Sequence[Mapping[str, Any]]) -> Chart:
    series = [Series(label, points(steps, name), f"s{n}") for n, (name, label) in enumerate(panel.lines)]
    if panel.stacked:
        last = ", ".join(f"{one.label} {one.points[-1][1]:g}" for one in series if one.points)
        return bar_chart(panel.title, series, summary=f"over {len(steps)} steps; in the last, {last}")
    form = share if panel.is_share else number
    return line_chart(panel.title, series, lowest=panel.lowest, highest=panel.highest, form=form)

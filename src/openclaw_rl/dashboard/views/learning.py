"""Learning: training steps in charts and in a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.dashboard.components.svg import Chart, Series, bar_chart, line_chart, share
from openclaw_rl.dashboard.evaluations import Evaluation
from openclaw_rl.learn.reporting import MEAN_GAP
from openclaw_rl.types import StepOutcome, UpdateCard

OUTCOMES = {
    StepOutcome.APPLIED: "counts",
    StepOutcome.UNDONE: "made again",
    StepOutcome.ROLLED_BACK: "rolled back",
    StepOutcome.QUARANTINED: "refused",
}


#: The style sheet has so many colours of lines.
MAX_EVALUATED = 6


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
    Panel("Reward: mean score of a batch", (("reward", ""),), -1.0, 1.0),
    Panel("Mean reward of an episode", (("episode_reward", ""),)),
    Panel("Share of episodes that were solved", (("solved", ""),), 0, 1, is_share=True),
    Panel("Loss", (("loss", ""),)),
    Panel("KL per token", (("kl_old", "to the previous policy"), ("kl_base", "to the base model")), 0),
    Panel("Share of clipped tokens", (("clip_fraction", ""),), 0, is_share=True),
    Panel("Gradient norm", (("grad_norm", ""),), 0),
    Panel("Staleness: policy versions since the answer", (("staleness", ""),), 0),
    Panel("Seconds", (("step_seconds", "per step"), ("latency_seconds", "from feedback to served weights")), 0),
    Panel("Gap between sampler and learner, in log-prob", ((MEAN_GAP, ""),), 0),
    Panel("Samples per step", (("opd_rl", "opd+rl"), ("opd", "opd"), ("rl", "rl")), 0, stacked=True),
)
#: The columns of the table: heading, metric, format.
COLUMNS = (
    ("Reward", "reward", "{:+.2f}"),
    ("Loss", "loss", "{:.3g}"),
    ("KL", "kl_old", "{:.2g}"),
    ("Clipped", "clip_fraction", "{:.1%}"),
    ("Staleness", "staleness", "{:.1f}"),
    ("Gap", MEAN_GAP, "{:.2g}"),
    ("Seconds", "step_seconds", "{:.1f}"),
)


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step in the table."""

    number: int
    step: int
    version: int | None
    outcome: StepOutcome
    reason: str
    created: float
    turns: int
    cells: tuple[str, ...]

    @property
    def outcome_words(self) -> str:
        return OUTCOMES[self.outcome]

    @property
    def counts(self) -> bool:
        return self.outcome is StepOutcome.APPLIED


def step_row(update: UpdateCard) -> StepRow:
    return StepRow(
        update.number,
        update.step,
        update.version,
        update.outcome,
        update.reason,
        update.created,
        update.turns,
        tuple(cell(update.metrics, name, form) for _, name, form in COLUMNS),
    )


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
        for place, (what, measured) in enumerate(list(shares.items())[:MAX_EVALUATED])
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
    form = share if panel.is_share else None
    return line_chart(panel.title, series, lowest=panel.lowest, highest=panel.highest, form=form)

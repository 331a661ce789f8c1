"""The demo's page and picture: what was learned, in numbers and in answers to held-out questions.

- A fixed rule chooses what is shown: some answers that got better, one that got worse if there is one, one that did not
  change, and the first, a middle and the last conversation.
- Each persona has a row of two charts, over minutes and over sessions, with a line for each method. For several seeds
  the line is their mean, with a band from the worst to the best; a seed that ended early keeps its last value. For one
  seed, the band is the 95 % interval.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from openclaw_rl.dashboard.components.render import render
from openclaw_rl.evals.conversation import Transcript
from openclaw_rl.evals.examination import ExamAnswer, is_adherent, marks
from openclaw_rl.evals.summary import Summary, exams, grouped, in_order, summarise
from openclaw_rl.evals.trial import Exam, TrialOutcome
from openclaw_rl.lab.charts import COLOURS, Chart, Series, chart_file, line_chart, share
from openclaw_rl.lab.commands import write_text
from openclaw_rl.lab.statistics import RUN, proportion_of_trials

TEMPLATE = "evals/demo.html.j2"
HEADING = "Unseen questions answered as wanted"
GUARD = "pass the quality guard"
#: How many answers are shown for each method with each persona: better, worse and unchanged ones.
MAX_BETTER, MAX_WORSE, MAX_SAME = 3, 1, 1
#: Libraries whose versions are shown.
LIBRARIES = ("torch", "transformers")


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two answers to one question."""

    question: str
    before: ExamAnswer
    after: ExamAnswer


@dataclass(frozen=True, slots=True)
class PageSection:
    """The answers and conversations of a method with a persona, from its lowest seed."""

    method: str
    persona: str
    wishes: tuple[str, ...]
    seed: int
    pairs: list[AnswerPair]
    conversations: list[tuple[int, Transcript]]
    """Each with its number, counted from 1."""


def write_page(outcomes: Sequence[TrialOutcome], path: Path, command: str, model: str) -> None:
    """Write the page. Raises UserError if the file cannot be written."""
    write_text(path, page(outcomes, command, model))


def save_curve(outcomes: Sequence[TrialOutcome], path: Path) -> None:
    """Write the charts to an SVG file. Raises UserError if it cannot be written."""
    write_text(path, chart_file(HEADING, curve_charts(outcomes), columns=2))


def page(outcomes: Sequence[TrialOutcome], command: str, model: str) -> str:
    """The page's text."""
    summaries = summarise(outcomes)
    return render(
        TEMPLATE,
        curves=curve_charts(outcomes),
        summaries=summaries,
        noted=any(summary.with_notes for summary in summaries),
        headline=headline(summaries),
        improved=is_improved(headline(summaries)),
        stopped=any(not outcome.is_complete for outcome in outcomes),
        sections=[section(group[0]) for group in grouped(outcomes).values()],
        row=RUN,
        command=command,
        model=model,
        versions=libraries(),
    )


def libraries() -> dict[str, str]:
    """The versions of Python and of the libraries that matter."""
    return {"Python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}


def headline(summaries: Sequence[Summary]) -> Summary | None:
    """The summary for the top of the page: the first that is complete, not the best."""
    return next((summary for summary in summaries if summary.before and summary.after), None)


def is_improved(summary: Summary | None) -> bool:
    """Whether the improvement is larger than chance: the intervals do not overlap."""
    return bool(summary and summary.before and summary.after and summary.after.low > summary.before.high)


def section(outcome: TrialOutcome) -> PageSection:
    plan = outcome.plan
    wishes = tuple(rule.name for rule in plan.persona.rules)
    return PageSection(
        plan.label, plan.persona.name, wishes, plan.seed, choose_pairs(outcome), choose_conversations(outcome)
    )


def choose_pairs(outcome: TrialOutcome) -> list[AnswerPair]:
    """Answers before and after, in the order in which the questions were asked."""
    held = exams(outcome)
    if len(held) < 2:
        return []
    after = {answer.question.text: answer for answer in held[-1].answers}
    pairs = [
        AnswerPair(a.question.text, a, after[a.question.text]) for a in held[0].answers if a.question.text in after
    ]
    better = [pair for pair in pairs if pair.after.passed and not pair.before.passed]
    worse = [pair for pair in pairs if pair.before.passed and not pair.after.passed]
    same = [pair for pair in pairs if pair.before.passed == pair.after.passed]
    return [*better[:MAX_BETTER], *worse[:MAX_WORSE], *same[:MAX_SAME]]


def choose_conversations(outcome: TrialOutcome) -> list[tuple[int, Transcript]]:
    """The first conversation, one from the middle, and the last."""
    sessions = [held for held in outcome.sessions if held.conversation.exchanges]
    places = sorted({0, len(sessions) // 2, len(sessions) - 1} if sessions else ())
    return [(sessions[place].number + 1, sessions[place].conversation) for place in places]


@dataclass(frozen=True, slots=True)
class Curve:
    """A method's line in a chart."""

    x: list[float]
    adherence: list[float]
    low: list[float]
    high: list[float]
    quality: list[float]
    seeds: int


def curve(group: Sequence[TrialOutcome], x: Callable[[Exam], float]) -> Curve | None:
    """One line for all seeds of a method; None if there was no examination."""
    lines = [line for line in ({x(exam): exam for exam in exams(outcome)} for outcome in group) if line]
    if not lines:
        return None
    places = sorted({place for line in lines for place in line})
    adherence = np.array([_at(places, line, lambda exam: exam.adherence) for line in lines])
    quality = np.array([_at(places, line, lambda exam: exam.quality) for line in lines])
    low, high = adherence.min(0), adherence.max(0)
    if len(lines) == 1:
        intervals = [proportion_of_trials([marks(lines[0][place].answers, is_adherent)]) for place in places]
        low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
    return Curve(places, adherence.mean(0).tolist(), low.tolist(), high.tolist(), quality.mean(0).tolist(), len(lines))


def _at(places: Sequence[float], line: dict[float, Exam], value: Callable[[Exam], float]) -> list[float]:
    """A seed's values at all places where any seed was examined, interpolated."""
    known = sorted(line)
    values: list[float] = np.interp(places, known, [value(line[place]) for place in known]).tolist()
    return values


def curve_charts(outcomes: Sequence[TrialOutcome]) -> list[Chart]:
    """Two charts for each persona."""
    groups = grouped(outcomes)
    personas = list(dict.fromkeys(persona for persona, _ in groups)) or [""]
    methods = in_order(method for _, method in groups)
    seeds = max((len(group) for group in groups.values()), default=1)
    keys = [(f"s{number % COLOURS}", method) for number, method in enumerate(methods)]
    band = f"worst to best of {seeds} seeds" if seeds > 1 else "95 % interval"
    charts = []
    for persona in personas:
        where = f"{persona}: " if len(personas) > 1 else ""
        for axis, x in (("minutes", _minutes), ("sessions", _sessions)):
            lines = [(style, method, curve(groups.get((persona, method), ()), x)) for style, method in keys]
            series = [one for style, method, line in lines if line for one in _series(style, method, line)]
            chart = line_chart(f"{where}over {axis}", series, unit=axis, axis=axis, lowest=0, highest=1, form=share)
            charts.append(replace(chart, legend=(*keys, ("dashed", GUARD), ("band", band))))
    return charts


def _series(style: str, method: str, line: Curve) -> list[Series]:
    band = list(zip(line.x, line.low, line.high, strict=True))
    adherence = list(zip(line.x, line.adherence, strict=True))
    quality = list(zip(line.x, line.quality, strict=True))
    return [
        Series(f"{method}, {GUARD}", quality, style, drawn="dashed"),
        # Dots mark examinations. The mean of several seeds has mostly interpolated points, so it has no dots.
        Series(method, adherence, style, band, "line" if line.seeds == 1 else "line without dots"),
    ]


def _minutes(exam: Exam) -> float:
    return exam.seconds / 60


def _sessions(exam: Exam) -> float:
    return exam.sessions

"""The results of trials: one summary for each method with each persona, over all seeds."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from openclaw_rl.evals.arguments import METHODS
from openclaw_rl.evals.examination import ExamAnswer, is_adherent, is_sensible, marks
from openclaw_rl.evals.trial import Exam, TrialOutcome
from openclaw_rl.lab.statistics import (
    Interval,
    SessionsUntil,
    mean_until,
    proportion_of_trials,
    sessions_until_adherence,
)


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a method with a persona.

    Shares are over the answers of all seeds. The intervals account for repeated questions.
    """

    method: str
    persona: str
    seeds: tuple[int, ...]
    before: Interval | None
    """Adherence of the base model; None if it was not examined."""
    after: Interval | None
    quality_before: Interval | None
    """The share of answers that pass the quality guard."""
    quality_after: Interval | None
    until: SessionsUntil | None
    """Sessions until adherence; None if there was no session."""
    sessions: int
    minutes: float
    """The mean over seeds."""
    with_notes: Interval | None = None
    """Adherence of the last policy with notes in its prompt, if the method uses notes; `after` is without them."""


def grouped(outcomes: Iterable[TrialOutcome]) -> dict[tuple[str, str], list[TrialOutcome]]:
    """Trials by persona and method, in the order of the personas' first trials, each group sorted by seed."""
    groups: dict[tuple[str, str], list[TrialOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.plan.persona.name, outcome.plan.label), []).append(outcome)
    personas = list(dict.fromkeys(persona for persona, _ in groups))
    methods = in_order(method for _, method in groups)
    keys = [(persona, method) for persona in personas for method in methods if (persona, method) in groups]
    return {key: sorted(groups[key], key=lambda outcome: outcome.plan.seed) for key in keys}


def in_order(methods: Iterable[str]) -> list[str]:
    """Each method once, in the order of `METHODS`, unknown ones last."""
    names = list(dict.fromkeys(methods))
    return [name for name in METHODS if name in names] + [name for name in names if name not in METHODS]


def exams(outcome: TrialOutcome) -> list[Exam]:
    """The examinations that have answers, in order."""
    return sorted((exam for exam in outcome.exams if exam.answers), key=lambda exam: (exam.seconds, exam.version))


def summarise(outcomes: Iterable[TrialOutcome]) -> list[Summary]:
    return [_summary(persona, method, group) for (persona, method), group in grouped(outcomes).items()]


def _summary(persona: str, method: str, group: Sequence[TrialOutcome]) -> Summary:
    first = [exam for outcome in group for exam in exams(outcome)[:1]]
    # A single examination is the first, not the last.
    last = [exam for outcome in group for exam in exams(outcome)[1:][-1:]]
    return Summary(
        method,
        persona,
        tuple(outcome.plan.seed for outcome in group),
        _share(first, is_adherent),
        _share(last, is_adherent),
        _share(first, is_sensible),
        _share(last, is_sensible),
        _until(group),
        sum(len(outcome.sessions) for outcome in group),
        fmean(max((exam.seconds for exam in outcome.exams), default=0.0) for outcome in group) / 60,
        _share([outcome.noted for outcome in group if outcome.noted], is_adherent),
    )


def _share(held: Sequence[Exam], is_good: Callable[[ExamAnswer], bool]) -> Interval | None:
    """The share of good answers in examinations, one per seed; None if there are none."""
    return proportion_of_trials([marks(exam.answers, is_good) for exam in held]) if held else None


def _until(group: Sequence[TrialOutcome]) -> SessionsUntil | None:
    """Sessions until adherence. A trial that was cut short counts up to its last session."""
    held = [outcome for outcome in group if outcome.sessions]
    if not held:
        return None
    results = [sessions_until_adherence(outcome.first_replies) for outcome in held]
    never = [len(outcome.sessions) for outcome, result in zip(held, results, strict=True) if result is None]
    return mean_until(results, min(never) if never else max(outcome.plan.sessions for outcome in held))

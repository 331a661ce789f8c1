"""The demo's page: what was learned, in numbers and in answers to held-out questions.

A fixed rule chooses what is shown: some answers that got better, one that got worse if there is one, one that did not
change, and the first, a middle and the last conversation.
"""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from openclaw_rl.dashboard.components.render import render, write
from openclaw_rl.evals.conversation import Transcript
from openclaw_rl.evals.examination import ExamAnswer
from openclaw_rl.evals.pictures import curve_svg
from openclaw_rl.evals.summary import Summary, exams, grouped, summarise
from openclaw_rl.evals.trial import TrialOutcome
from openclaw_rl.lab.statistics import RUN

TEMPLATE = "evals/demo.html.j2"
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
    """Write the page. Raises UserError without Matplotlib, or if the file cannot be written."""
    write(path, page(outcomes, command, model))


def page(outcomes: Sequence[TrialOutcome], command: str, model: str) -> str:
    """The page's text."""
    summaries = summarise(outcomes)
    return render(
        TEMPLATE,
        picture=curve_svg(outcomes),
        summaries=summaries,
        noted=any(summary.with_notes for summary in summaries),
        headline=headline(summaries),
        improved=is_improved(headline(summaries)),
        stopped=any(not outcome.is_complete for outcome in outcomes),
        sections=[section(group[0]) for group in grouped(outcomes).values()],
        row=RUN,
        command=command,
        model=model,
        versions={"Python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
    )


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
        plan.method, plan.persona.name, wishes, plan.seed, choose_pairs(outcome), choose_conversations(outcome)
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

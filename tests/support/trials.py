"""Made-up results of trials, and files that are refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.errors import UserError
from openclaw_rl.evals.conversation import EvalQuestion, Exchange, Transcript
from openclaw_rl.evals.examination import ExamAnswer
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.trial import Exam, HeldSession, TrialOutcome, TrialPlan


def refusal(load: Callable[[str], object], path: Path, text: str, old: str, new: str) -> str:
    """What is said of a file with an error in it; it names the file."""
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        load(str(path))
    assert path.name in str(error.value)
    return str(error.value)


def a_question(number: int, text: str = "") -> EvalQuestion:
    return EvalQuestion(text or f"Question {number}?", "things", f"Reference {number}.", "held-out", ())


def an_answer(number: int, passed: bool = True, text: str = "", **given: Any) -> ExamAnswer:
    return ExamAnswer(
        a_question(number, given.get("question", "")),
        text or f"{'Good' if passed else 'Bad'} answer {number}.",
        given.get("keeps_rules", passed),
        given.get("faults", ()),
    )


def an_exam(marks: Sequence[bool], seconds: float = 0.0, sessions: int = 0, version: int = 0) -> Exam:
    """An examination with a mark for each question."""
    return Exam(version, seconds, sessions, tuple(an_answer(n, passed) for n, passed in enumerate(marks)))


def an_exchange(number: int, passed: bool = True, **given: str) -> Exchange:
    return Exchange(
        a_question(number),
        given.get("message", f"Message {number}"),
        given.get("answer", f"Reply {number}"),
        passed,
        () if passed else ("one short sentence",),
        given.get("reaction", f"Reaction {number}"),
    )


def a_session(number: int, *passed: bool) -> HeldSession:
    exchanges = tuple(an_exchange(10 * number + n, mark) for n, mark in enumerate(passed or (True,)))
    return HeldSession(number, 10.0 * number, Transcript(f"s{number}", exchanges))


def a_trial(
    *exams: Exam,
    method: str = "combine",
    persona: str = "brief",
    seed: int = 0,
    sessions: Sequence[bool] = (),
    planned: int = 60,
) -> TrialOutcome:
    """A trial with these examinations; `sessions` lists whether the first reply of each session passed."""
    plan = TrialPlan(method, load(persona), seed, Path("runs/trial"), planned, 10.0)
    held = [a_session(number, passed) for number, passed in enumerate(sessions)]
    return TrialOutcome(plan, list(exams), held, is_complete=True)


def learning(method: str = "combine", persona: str = "brief", seed: int = 0) -> TrialOutcome:
    """A trial that goes well: adherence rises from a quarter to three quarters."""
    exams = [
        an_exam([n % 4 < most for n in range(16)], 60.0 * step + seed, 5 * step, 4 * step)
        for step, most in enumerate((1, 2, 2, 3))
    ]
    return a_trial(*exams, method=method, persona=persona, seed=seed, sessions=[False, True, False, True, True, True])

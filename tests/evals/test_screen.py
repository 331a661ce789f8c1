"""What is seen while trials run, in a terminal and in a file."""

import io
import re

from rich.console import Console

from openclaw_rl.evals.screen import Screen
from openclaw_rl.evals.trial import TrialOutcome
from support.trials import a_trial, an_exam


def a_file() -> Console:
    return Console(file=io.StringIO(), width=160)


def a_terminal() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines(console: Console) -> list[str]:
    """With no sign in them that only a terminal understands."""
    shown = text(console)
    assert re.fullmatch(r"[^\x00-\x09\x0b-\x1f\x7f]*", shown), shown
    return [" ".join(line.split()) for line in shown.splitlines()]


def held(sessions: int) -> TrialOutcome:
    return a_trial(an_exam([False]), sessions=[True] * sessions)


def test_a_file_gets_a_line_for_each_phase_of_a_trial() -> None:
    console = a_file()
    with Screen(console, 1) as screen:
        trial = held(0)
        screen.starting(trial.plan)
        screen.started(trial.plan)
        for done in range(3):
            screen.examining(trial, 0.0, done, 2)
        screen.examined(trial, an_exam([True, False]))
        for sessions in (3, 9, 12, 12, 19, 25):
            screen.talking(held(sessions), 6.0 * sessions, "waiting [for 2 turns]")
        screen.ended(trial.plan)
    assert lines(console) == [
        "combine, persona brief, seed 0 runs/trial",
        "0.0 min 0 sessions server started",
        "0.0 min 0 sessions asking 2 held-out questions",
        "0.0 min 0 sessions policy 0 adherence 0.50 sensible answers 1.00",
        "1.2 min 12 sessions talking, learner: waiting [for 2 turns]",
        "2.5 min 25 sessions talking, learner: waiting [for 2 turns]",
        "2.5 min 25 sessions done",
    ]


def test_of_several_trials_each_line_says_which() -> None:
    console = a_file()
    with Screen(console, 2) as screen:
        screen.starting(held(0).plan)
        screen.started(held(0).plan)
        screen.failed(held(0).plan, "It is gone.")
    title = "1 of 2: combine, persona brief, seed 0"
    assert lines(console)[1:] == [f"0.0 min 0 sessions server started {title}", f"{title} failed: It is gone."]


def test_a_terminal_has_a_panel_and_lines_for_examinations_alone() -> None:
    console = a_terminal()
    with Screen(console, 1) as screen:
        screen.starting(held(0).plan)
        screen.started(held(0).plan)
        screen.talking(held(20), 120.0, "training")
        screen.examining(held(20), 540.0, 0, 40)
        screen.examining(held(20), 546.0, 3, 40)
    shown = text(console)
    assert "9.1 min" in shown
    assert "3 of 40" in shown
    assert "server started" not in shown

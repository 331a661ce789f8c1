"""What is seen while trials and evaluations run, in a terminal and in a file."""

import io
import re
from itertools import count

from rich.console import Console

from openclaw_rl.evals.screen import EvalProgress, Screen, TimeLeft
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


def time_left(tokens: int) -> TimeLeft:
    """With a clock that goes on by a second for each case."""
    seconds = count()
    return TimeLeft(tokens, lambda: float(next(seconds)))


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


def test_a_file_gets_a_line_now_and_then_of_an_evaluation() -> None:
    console = a_file()
    with EvalProgress(console, "runs/[1]/step-7", time_left(23 * 10 + 30 * 60)) as progress:
        progress.begin("starting a server")
        progress.log("server started")
        advance = progress.begin("coding", 23, 10)
        for _ in range(23):
            advance()
        progress.log("coding: done")
    assert lines(console) == [
        f"runs/[1]/step-7: {what}"
        for what in (
            "starting a server",
            "server started",
            # 10 cases of 10 tokens took 10 seconds; 13 of 10 and 30 of 60 are left.
            "coding: 10 of 23 cases, about 3 min left",
            "coding: 20 of 23 cases, about 3 min left",
            "coding: done",
        )
    ]


def test_the_time_left_is_that_of_all_tasks_and_models() -> None:
    left = time_left(10 * 10 + 1 * 50)
    for done in range(4):
        left.advance(10)
        assert not str(left), f"{done + 1} cases tell too little"
    left.advance(10)
    assert str(left) == "about 10 s left"
    left.begin()
    for _ in range(5):
        left.advance(10)
    assert str(left) == "about 5 s left"
    left.advance(50)
    assert not str(left)


def test_a_terminal_has_a_bar_for_what_goes_on_in_an_evaluation() -> None:
    console = a_terminal()
    with EvalProgress(console, "base", time_left(21 * 100)) as progress:
        progress.begin("starting a server")
        advance = progress.begin("coding", 21, 100)
        for _ in range(20):
            advance()
        progress.progress.refresh()
    assert "coding" in text(console)
    assert "about 1 s left" in text(console)
    assert "cases" not in text(console)

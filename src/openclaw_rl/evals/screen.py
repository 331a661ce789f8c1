"""The progress of trials on the screen, or as lines where there is no terminal.

A trial shows its progress, its adherence, and an answer before and now.
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openclaw_rl.evals.trial import Exam, TrialOutcome, TrialPlan
from openclaw_rl.lab.commands import LINE_INTERVAL, RunProgress

#: How much of an answer is shown.
MAX_ANSWER_CHARACTERS = 320
BAR_WIDTH = 30


class Screen(RunProgress):
    """Implements `TrialWatcher` for trials that run one after another or at the same time.

    In a terminal it shows a live panel, or a table when several trials run; elsewhere it prints lines.
    """

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(console, "trials", total)
        self.bar.update(self._task, visible=total > 1)
        self._titles: dict[Path, str] = {}
        #: The progress of the running trials, in the order in which they began.
        self._running: dict[Path, TrialProgress] = {}
        #: The number of sessions of each trial in its last line.
        self._printed: dict[Path, int] = {}

    def starting(self, plan: TrialPlan) -> None:
        position = f"{len(self._titles) + 1} of {self.total}: " if self.total > 1 else ""
        title = f"{position}{plan.label}, persona {plan.persona.name}, seed {plan.seed}"
        self._titles[plan.run_dir] = title
        self.console.print(f"[bold]{title}[/bold]  [dim]{plan.run_dir}[/dim]")
        self._show(TrialOutcome(plan), "Starting a server (the first start converts the model) …", 0.0)

    def started(self, plan: TrialPlan) -> None:
        self._show(TrialOutcome(plan), "The server has started.", 0.0)
        self._print_progress(plan, "server started")

    def talking(self, outcome: TrialOutcome, seconds: float, state: str) -> None:
        self._show(outcome, f"Talking. Learner: {state}", seconds)
        sessions = len(outcome.sessions)
        if sessions // LINE_INTERVAL > self._printed.get(outcome.plan.run_dir, 0) // LINE_INTERVAL:
            self._printed[outcome.plan.run_dir] = sessions
            self._print_progress(outcome.plan, f"talking, learner: {escape(state)}")

    def examining(self, outcome: TrialOutcome, seconds: float, done: int, total: int) -> None:
        self._show(outcome, f"Asking held-out questions: {done} of {total}", seconds)
        if done == 0:
            self._print_progress(outcome.plan, f"asking {total} held-out questions")

    def examined(self, outcome: TrialOutcome, exam: Exam) -> None:
        scores = f"adherence [bold]{exam.adherence:.2f}[/bold]   sensible answers {exam.quality:.2f}"
        self._line(outcome.plan, exam.seconds, exam.sessions, f"policy {exam.version:3d}   {scores}")

    def failed(self, plan: TrialPlan, why: str) -> None:
        self.console.print(f"[red]{self._titles[plan.run_dir]} failed:[/red] {escape(why)}", soft_wrap=True)
        del self._running[plan.run_dir]

    def ended(self, plan: TrialPlan) -> None:
        self._print_progress(plan, "done")
        del self._running[plan.run_dir]

    def _print_progress(self, plan: TrialPlan, what: str) -> None:
        """Print a line if there is no live panel."""
        if not self.console.is_terminal:
            progress = self._running[plan.run_dir]
            self._line(plan, progress.seconds, len(progress.outcome.sessions), what)

    def _line(self, plan: TrialPlan, seconds: float, sessions: int, what: str) -> None:
        title = f"   [dim]{self._titles[plan.run_dir]}[/dim]" if self.total > 1 else ""
        self.console.print(f"  {seconds / 60:4.1f} min  {sessions:4d} sessions  {what}{title}", soft_wrap=True)

    def _show(self, outcome: TrialOutcome, activity: str, seconds: float) -> None:
        progress = self._running[outcome.plan.run_dir] = TrialProgress(outcome, activity, seconds)
        if not self.console.is_terminal:
            return
        if len(self._running) > 1:
            self.bar.below = self._overview()
        else:
            title = self._titles[outcome.plan.run_dir]
            self.bar.below = Panel(Group(*details(progress)), title=title, title_align="left")

    def _overview(self) -> Table:
        """One row per running trial."""
        table = Table("trial", "time", "sessions", "adherence", "")
        for run_dir, trial in self._running.items():
            row = (self._titles[run_dir], trial.time, trial.session_count, trial.change)
            table.add_row(*row, Text(trial.activity, "dim"))
        return table


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """The state of a running trial."""

    outcome: TrialOutcome
    activity: str
    seconds: float

    @property
    def time(self) -> str:
        return f"{self.seconds / 60:.1f} min"

    @property
    def session_count(self) -> str:
        return str(len(self.outcome.sessions))

    @property
    def change(self) -> str:
        """Adherence at the beginning and now."""
        exams = self.outcome.exams
        return f"{exams[0].adherence:.2f} → {exams[-1].adherence:.2f}" if exams else ""


def details(progress: TrialProgress) -> list[RenderableType]:
    """A trial with progress bars and two answers to compare."""
    outcome, plan, exams = progress.outcome, progress.outcome.plan, progress.outcome.exams
    table = Table.grid(padding=(0, 2))
    table.add_row("time", ProgressBar(60 * plan.minutes, progress.seconds, width=BAR_WIDTH), progress.time)
    sessions = ProgressBar(plan.sessions, len(outcome.sessions), width=BAR_WIDTH)
    table.add_row("sessions", sessions, progress.session_count)
    if exams:
        table.add_row("adherence", ProgressBar(1.0, exams[-1].adherence, width=BAR_WIDTH), progress.change)
    lines: list[RenderableType] = [table, Text(progress.activity, style="dim")]
    if len(exams) > 1:
        lines.append(before_and_now(exams[0], exams[-1]))
    return lines


def before_and_now(first: Exam, last: Exam) -> Table:
    """Two answers to the same held-out question."""
    before = first.answers[0]
    now = next(answer for answer in last.answers if answer.question == before.question)
    table = Table(title=before.question.text, title_justify="left", expand=True)
    for heading, answer in (("before", before), ("now", now)):
        table.add_column(f"{heading} {'✓' if answer.passed else '✗'}", ratio=1)
    table.add_row(clipped(before.answer), clipped(now.answer))
    return table


def clipped(text: str) -> Text:
    return Text(text if len(text) <= MAX_ANSWER_CHARACTERS else text[:MAX_ANSWER_CHARACTERS] + " …")

"""What somebody sees of trials and evaluations while they run; where there is no terminal, plain lines.

Of a trial: how far it is, what it can do by now, and an answer before and now. Of an evaluation: how far it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openclaw_rl.evals.trial import Exam, TrialOutcome, TrialPlan

#: Of an answer that is shown beside another.
SHOWN_CHARACTERS = 320
BAR_WIDTH = 30
#: Sessions or cases from one line to the next, where there is no terminal.
EVERY = 10


class Screen:
    """Implements `TrialWatcher` for trials that run one after the other or side by side.

    In a terminal a live panel, or a table when there are several; elsewhere lines, as it goes on.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._titles: dict[Path, str] = {}
        #: What is known of the trials that run, in the order in which they began.
        self._running: dict[Path, TrialProgress] = {}
        #: The sessions of each trial when a line last told of them.
        self._told: dict[Path, int] = {}

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def starting(self, plan: TrialPlan) -> None:
        which = f"{len(self._titles) + 1} of {self.total}: " if self.total > 1 else ""
        title = f"{which}{plan.method}, persona {plan.persona.name}, seed {plan.seed}"
        self._titles[plan.run_dir] = title
        self.console.print(f"[bold]{title}[/bold]  [dim]{plan.run_dir}[/dim]")
        self._show(TrialOutcome(plan), "Starting a server (the first start converts the model) …", 0.0)

    def started(self, plan: TrialPlan) -> None:
        self._show(TrialOutcome(plan), "The server has started.", 0.0)
        self._tell(plan, "server started")

    def talking(self, outcome: TrialOutcome, seconds: float, state: str) -> None:
        self._show(outcome, f"Talking. Learner: {state}", seconds)
        held = len(outcome.sessions)
        if held // EVERY > self._told.get(outcome.plan.run_dir, 0) // EVERY:
            self._told[outcome.plan.run_dir] = held
            self._tell(outcome.plan, f"talking, learner: {escape(state)}")

    def examining(self, outcome: TrialOutcome, seconds: float, done: int, total: int) -> None:
        self._show(outcome, f"Asking questions that it has never seen: {done} of {total}", seconds)
        if done == 0:
            self._tell(outcome.plan, f"asking {total} questions that it has never seen")

    def examined(self, outcome: TrialOutcome, exam: Exam) -> None:
        fine = sum(not answer.faults for answer in exam.answers) / len(exam.answers)
        found = f"adherence [bold]{exam.adherence:.2f}[/bold]   sensible answers {fine:.2f}"
        self._line(outcome.plan, exam.seconds, exam.sessions, f"policy {exam.version:3d}   {found}")

    def failed(self, plan: TrialPlan, why: str) -> None:
        self.console.print(f"[red]{self._titles[plan.run_dir]} failed:[/red] {escape(why)}", soft_wrap=True)
        del self._running[plan.run_dir]

    def ended(self, plan: TrialPlan) -> None:
        self._tell(plan, "done")
        del self._running[plan.run_dir]

    def _tell(self, plan: TrialPlan, what: str) -> None:
        """A line for where nothing else is seen of it."""
        if not self.live:
            glance = self._running[plan.run_dir]
            self._line(plan, glance.seconds, len(glance.outcome.sessions), what)

    def _line(self, plan: TrialPlan, seconds: float, sessions: int, what: str) -> None:
        which = f"   [dim]{self._titles[plan.run_dir]}[/dim]" if self.total > 1 else ""
        self.console.print(f"  {seconds / 60:4.1f} min  {sessions:4d} sessions  {what}{which}", soft_wrap=True)

    def _show(self, outcome: TrialOutcome, doing: str, seconds: float) -> None:
        glance = self._running[outcome.plan.run_dir] = TrialProgress(outcome, doing, seconds)
        if not self.live:
            return
        if len(self._running) > 1:
            self.live.update(self._side_by_side())
        else:
            title = self._titles[outcome.plan.run_dir]
            self.live.update(Panel(Group(*closely(glance)), title=title, title_align="left"))

    def _side_by_side(self) -> Table:
        """A row for each trial that runs."""
        table = Table("trial", "time", "sessions", "adherence", "")
        for run_dir, glance in self._running.items():
            table.add_row(self._titles[run_dir], glance.time, glance.held, glance.change, Text(glance.doing, "dim"))
        return table


class EvalProgress:
    """How far the evaluation of a model is: in a terminal a bar for what is done at the moment, elsewhere lines."""

    def __init__(self, console: Console, model: str) -> None:
        self.console, self.model = console, model
        self.progress = Progress(console=console, transient=True)

    def __enter__(self) -> "EvalProgress":
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def begin(self, what: str, total: int | None = None) -> Callable[[], None]:
        """What goes on from now on; what is returned is to be called for each case that is done."""
        for earlier in self.progress.task_ids:
            self.progress.remove_task(earlier)
        bar = self.progress.add_task(what, total=total)
        if total is None:
            self.tell(what)
        done = count(1)

        def advance() -> None:
            self.progress.advance(bar)
            if (number := next(done)) % EVERY == 0:
                self.tell(f"{what}: {number} of {total} cases")

        return advance

    def tell(self, what: str) -> None:
        """A line for where no bar is seen."""
        if not self.console.is_terminal:
            self.console.print(Text(f"{self.model}: {what}"), soft_wrap=True)


@dataclass(frozen=True, slots=True)
class TrialProgress:
    """A trial at a moment."""

    outcome: TrialOutcome
    doing: str
    seconds: float

    @property
    def time(self) -> str:
        return f"{self.seconds / 60:.1f} min"

    @property
    def held(self) -> str:
        return str(len(self.outcome.sessions))

    @property
    def change(self) -> str:
        """Adherence at first and now."""
        exams = self.outcome.exams
        return f"{exams[0].adherence:.2f} → {exams[-1].adherence:.2f}" if exams else ""


def closely(glance: TrialProgress) -> list[RenderableType]:
    """A trial with bars, and with two answers to compare."""
    outcome, plan, exams = glance.outcome, glance.outcome.plan, glance.outcome.exams
    table = Table.grid(padding=(0, 2))
    table.add_row("time", ProgressBar(60 * plan.minutes, glance.seconds, width=BAR_WIDTH), glance.time)
    table.add_row("sessions", ProgressBar(plan.sessions, len(outcome.sessions), width=BAR_WIDTH), glance.held)
    if exams:
        table.add_row("adherence", ProgressBar(1.0, exams[-1].adherence, width=BAR_WIDTH), glance.change)
    lines: list[RenderableType] = [table, Text(glance.doing, style="dim")]
    if len(exams) > 1:
        lines.append(before_and_now(exams[0], exams[-1]))
    return lines


def before_and_now(first: Exam, last: Exam) -> Table:
    """Two answers to the same question, which nobody asked while it learned."""
    before = first.answers[0]
    now = next(answer for answer in last.answers if answer.question == before.question)
    table = Table(title=before.question.text, title_justify="left", expand=True)
    for heading, answer in (("before", before), ("now", now)):
        table.add_column(f"{heading} {'✓' if answer.passed else '✗'}", ratio=1)
    table.add_row(clipped(before.answer), clipped(now.answer))
    return table


def clipped(text: str) -> Text:
    return Text(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …")

"""What somebody sees of a trial while it runs: how far it is, what it can do by now, and an answer before and now."""

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openclaw_rl.evals.trial import Exam, Outcome, Plan

#: Of an answer that is shown beside another.
SHOWN_CHARACTERS = 320
BAR_WIDTH = 30


class Screen:
    """Implements `Watch`: a live panel in a terminal, a line an examination elsewhere."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._number = 0
        self._what = ""

    def __enter__(self) -> "Screen":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def starting(self, plan: Plan) -> None:
        self._number += 1
        which = f"{self._number} of {self.total}: " if self.total > 1 else ""
        self._what = f"{which}{plan.method}, persona {plan.persona.name}, seed {plan.seed}"
        self.console.print(f"[bold]{self._what}[/bold]  [dim]{plan.run_dir}[/dim]")
        self._show(Outcome(plan), "Starting a server (the first start converts the model) …", 0.0)

    def talking(self, outcome: Outcome, seconds: float, state: str) -> None:
        self._show(outcome, f"Talking. Learner: {state}", seconds)

    def examining(self, outcome: Outcome, done: int, total: int) -> None:
        last = outcome.exams[-1].seconds if outcome.exams else 0.0
        self._show(outcome, f"Asking questions that it has never seen: {done} of {total}", last)

    def examined(self, outcome: Outcome, exam: Exam) -> None:
        fine = sum(not answer.faults for answer in exam.answers) / len(exam.answers)
        self.console.print(
            f"  {exam.seconds / 60:4.1f} min  {exam.sessions:4d} sessions  policy {exam.version:3d}   "
            f"adherence [bold]{exam.adherence:.2f}[/bold]   sensible answers {fine:.2f}"
        )

    def _show(self, outcome: Outcome, doing: str, seconds: float) -> None:
        if self.live:
            self.live.update(Panel(Group(*self._lines(outcome, doing, seconds)), title=self._what, title_align="left"))

    def _lines(self, outcome: Outcome, doing: str, seconds: float) -> list[RenderableType]:
        plan, exams = outcome.plan, outcome.exams
        table = Table.grid(padding=(0, 2))
        table.add_row("time", ProgressBar(60 * plan.minutes, seconds, width=BAR_WIDTH), f"{seconds / 60:.1f} min")
        table.add_row(
            "sessions", ProgressBar(plan.sessions, len(outcome.sessions), width=BAR_WIDTH), str(len(outcome.sessions))
        )
        if exams:
            last = exams[-1].adherence
            change = f"{exams[0].adherence:.2f} → {last:.2f}"
            table.add_row("adherence", ProgressBar(1.0, last, width=BAR_WIDTH), change)
        lines: list[RenderableType] = [table, Text(doing, style="dim")]
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

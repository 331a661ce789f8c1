"""A line at the bottom of the terminal: the progress towards the next training step, or through a file."""

import asyncio
import contextlib

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.outside import OutsideTraining
from openclaw_rl.ledger.errors import LedgerError

REFRESH_SECONDS = 0.5
COLUMNS = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed}/{task.total}"))


async def show_learning(learning: LearnLoop | OutsideTraining, console: Console) -> None:
    """Keep the line up to date until cancelled; the log scrolls above it."""
    with Progress(*COLUMNS, TimeElapsedColumn(), console=console, transient=True) as progress:
        line = progress.add_task("", total=learning.settings.batch_size)
        shown = ""
        while True:
            with contextlib.suppress(LedgerError):
                if state := learning.progress():
                    what = f"{'training' if state.training else 'samples for'} step {state.step}"
                    if what != shown:
                        progress.reset(line)
                        shown = what
                    progress.update(
                        line, description=what, completed=min(state.samples, state.needed), total=state.needed
                    )
            await asyncio.sleep(REFRESH_SECONDS)


class TurnsBar:
    """Shows how many turns are done. The log scrolls above it; without a terminal nothing is shown."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            *COLUMNS, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self.progress.add_task("", total=0)

    def show(self, text: str, done: int, total: int) -> None:
        self.progress.update(self._task, description=text, completed=done, total=total)

"""How a rollout is shown: a bar in a terminal, lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from openclaw_rl.envs.tally import Tally, mean

#: Seconds between two lines where there is no terminal.
LINE_SECONDS = 10.0
#: How many kinds of failures the summary names.
MAX_REASONS = 5


class RolloutScreen:
    """Shows the progress of one rollout."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self.console, self.what, self.total = console, what, total
        columns = (
            TextColumn("{task.description}"),
            BarColumn(24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task(what, total=total, numbers="")
        self._next_line = time.monotonic() + LINE_SECONDS

    @contextmanager
    def shown(self) -> Iterator["RolloutScreen"]:
        if not self.console.is_terminal:
            yield self
            return
        with self._progress:
            yield self

    def ended(self, tally: Tally) -> None:
        self._show(tally, "")

    def waiting(self, tally: Tally) -> None:
        self._show(tally, f"waiting for the learner, {tally.batches_ahead:.1f} steps behind")

    def _show(self, tally: Tally, note: str) -> None:
        numbers = progress_line(tally) + (f" · {note}" if note else "")
        self._progress.update(self._bar, completed=len(tally.results), numbers=numbers)
        if not self.console.is_terminal and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            line = f"{self.what}: {len(tally.results)} of {self.total} episodes · {numbers}"
            self.console.print(Text(line), soft_wrap=True)


def progress_line(tally: Tally) -> str:
    """The latest attempts in a line."""
    parts = [
        f"reward {tally.recent_reward:.2f}",
        f"solved {100 * tally.recent_solved:.0f} %",
        f"{tally.per_minute:.0f} a minute",
        f"policy {tally.version}",
        f"staleness {tally.recent_staleness:.1f}",
    ]
    if failed := sum(tally.failures.values()):
        parts.append(f"{failed} failed")
    return " · ".join(parts)


def summary(tally: Tally, title: str) -> Table:
    """What became of all attempts."""
    rewarded = tally.rewarded
    table = Table(title=title, title_justify="left", show_header=False)
    rows: list[tuple[str, str]] = [
        ("episodes", f"{len(rewarded)} rewarded, {len(tally.results) - len(rewarded)} failed, {tally.groups} tasks"),
        ("reward", f"{mean([result.reward for result in rewarded if result.reward is not None]):.3f}"),
        ("solved", f"{100 * mean([float(result.solved) for result in rewarded]):.1f} %"),
        ("answers", f"{mean([float(result.turns) for result in rewarded]):.1f} in an episode"),
        ("speed", f"{tally.per_minute:.1f} episodes a minute"),
        ("policy", f"version {tally.version}, staleness {mean([float(r.staleness) for r in rewarded]):.2f}"),
    ]
    for name, value in rows + troubles(tally):
        table.add_row(name, Text(value))
    return table


def troubles(tally: Tally) -> list[tuple[str, str]]:
    """What went wrong, and how often."""
    rows = [("tasks", f"only {tally.groups} different ones")] if tally.tasks_repeat else []
    rows += [("made again", str(tally.retries))] if tally.retries else []
    rows += [("failed", f"{count} × {reason}") for reason, count in tally.failures.most_common(MAX_REASONS)]
    rows += [("not recorded", f"{count} × {reason}") for reason, count in tally.unrecorded.most_common(MAX_REASONS)]
    return rows

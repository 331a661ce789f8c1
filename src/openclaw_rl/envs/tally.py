"""Counts what became of the attempts of a rollout, and says it in lines and in a table."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from rich.table import Table
from rich.text import Text

#: How many of the last attempts the progress bar speaks about.
RECENT = 64
#: How many kinds of failures the summary names.
MAX_REASONS = 5


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """What became of one attempt."""

    task: str
    index: int
    """The number of its task in the rollout."""
    attempt: int
    """Its number in its group."""
    reward: float | None
    """None if the attempt failed, or if the server did not record its reward."""
    solved: bool = False
    turns: int = 0
    seconds: float = 0.0
    staleness: int = 0
    """How many policy versions appeared between its first answer and its end."""
    error: str = ""
    """Why the attempt failed."""
    unrecorded: str = ""
    """Why the server did not record it."""


@dataclass(slots=True)
class Tally:
    """The results so far."""

    results: list[AttemptResult] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Why attempts failed, and how often."""
    unrecorded: Counter[str] = field(default_factory=Counter)
    """Why attempts were not recorded, and how often."""
    retries: int = 0
    groups: int = 0
    version: int = 0
    """The newest policy version that was seen."""
    batches_ahead: float = 0.0
    tasks_repeat: bool = False
    """Whether the rollout ended early because the environment has no further different task."""
    began: float = field(default_factory=time.monotonic)
    finished: float | None = None
    _recent: deque[AttemptResult] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, result: AttemptResult) -> None:
        self.results.append(result)
        if result.reward is not None:
            self._recent.append(result)
        if result.error:
            self.failures[result.error] += 1
        if result.unrecorded:
            self.unrecorded[result.unrecorded] += 1

    def start(self) -> None:
        """Start the clock."""
        self.began = time.monotonic()

    def finish(self) -> None:
        """Stop the clock."""
        self.finished = time.monotonic()

    @property
    def rewarded(self) -> list[AttemptResult]:
        return [result for result in self.results if result.reward is not None]

    @property
    def recent_reward(self) -> float:
        return mean_reward(self._recent)

    @property
    def recent_solved(self) -> float:
        return share_solved(self._recent)

    @property
    def recent_staleness(self) -> float:
        return mean([float(result.staleness) for result in self._recent])

    @property
    def seconds(self) -> float:
        return (self.finished or time.monotonic()) - self.began

    @property
    def per_minute(self) -> float:
        return 60 * len(self.results) / max(self.seconds, 1e-9)


def mean(values: list[float]) -> float:
    """The mean; 0 if there are no values."""
    return fmean(values) if values else 0.0


def mean_reward(results: Iterable[AttemptResult]) -> float:
    return mean([result.reward for result in results if result.reward is not None])


def share_solved(results: Iterable[AttemptResult]) -> float:
    return mean([float(result.solved) for result in results])


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
        ("reward", f"{mean_reward(rewarded):.3f}"),
        ("solved", f"{100 * share_solved(rewarded):.1f} %"),
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

"""What a scenario is given, and what it reports."""

import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

#: An example of a failure is cut here, because it may quote a hostile request.
MAX_EXAMPLE_LENGTH = 600


@dataclass(frozen=True)
class Setting:
    """How large a scenario is, and where it may write."""

    model: Path
    """A tiny real model."""
    folder: Path
    """An empty folder, deleted afterwards."""
    scale: float
    """1 for the full size."""
    seed: int

    def times(self, count: int, least: int = 1) -> int:
        """How often to do what is done `count` times at full size."""
        return max(least, round(count * self.scale))


@dataclass
class Report:
    """What happened in one scenario. Threads may share it."""

    scenario: str
    counts: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    """How often each thing went wrong, in a sentence."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first case of each sentence."""
    memory: tuple[float, float] | None = None
    """MiB of the server's process before and after."""
    seconds: float = 0.0
    skipped: str = ""
    """Why the scenario cannot run on this machine; empty if it can."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def most(self, what: str, value: int) -> None:
        """Keep the largest value."""
        with self._lock:
            self.counts[what] = max(self.counts[what], value)

    def fail(self, sentence: str, example: str = "") -> None:
        with self._lock:
            self.failed[sentence] += 1
            self.examples.setdefault(sentence, example[:MAX_EXAMPLE_LENGTH])

    def check(self, holds: bool, sentence: str, example: str = "") -> bool:
        """Fail with the sentence unless the condition holds; returns the condition."""
        if not holds:
            self.fail(sentence, example)
        return holds

    def describe(self, sentence: str) -> str:
        """A failure with its number and its first case."""
        example = self.examples[sentence]
        return f"{self.failed[sentence]} × {sentence}" + (f", first: {example}" if example else "")

    def check_log(self, log: str) -> None:
        """Fail if the server's log has a traceback."""
        _, found, rest = log.partition("Traceback")
        self.check(not found, "the server's log has a traceback", rest)

"""The progress of what takes minutes: a bar in a terminal, lines elsewhere, and how long it still takes."""

import time
from collections.abc import Iterator
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

#: With fewer cases done, there is no estimate.
MIN_CASES = 5
#: Without a terminal, a line is printed after this many cases or sessions.
LINE_INTERVAL = 10


class RunningBar(Progress):
    """A progress bar, and what is shown below it."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below


class RunProgress:
    """What is seen of a run: a bar in a terminal, lines elsewhere. Both say how long it takes."""

    def __init__(self, console: Console, what: str, total: int, size: float = 0) -> None:
        """`total` cases, which are called `what`, are of this size together; else each is of size 1.

        A case takes the longer the larger it is.
        """
        self.console, self.what, self.total = console, what, total
        note = TextColumn("{task.fields[note]}", markup=False)
        columns = ("{task.description}", BarColumn(24), MofNCompleteColumn(), note)
        self.bar = RunningBar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self.bar.add_task(what, total=total, note="")
        self._done, self._size_done, self._size = 0, 0.0, size or total
        self._seconds, self._since = 0.0, time.monotonic()
        self.measuring = 0
        """Items that are being measured."""

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, what: str) -> None:
        """Say beside the bar what goes on."""
        self.bar.update(self._task, note=self.with_time(what))

    def log(self, what: str) -> None:
        """Say it in a line where there is no bar."""
        if not self.console.is_terminal:
            self.console.print(Text(what), soft_wrap=True)

    def begin(self) -> None:
        """Cases are asked from now on. The time until now does not count, unless others were asked meanwhile."""
        if not self.measuring:
            self._since = time.monotonic()

    def advance(self, what: str = "", size: float = 1) -> None:
        """A case of this size is done."""
        now = time.monotonic()
        self._seconds += now - self._since
        self._since = now
        self._done += 1
        self._size_done += size
        self.bar.update(self._task, completed=self._done)
        self.note(what)

    @property
    def time_left(self) -> str:
        """Empty if it cannot be estimated yet, or if nothing is left."""
        if self._done < MIN_CASES or self._size_done >= self._size:
            return ""
        seconds = self._seconds * (self._size / self._size_done - 1)
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {max(1, seconds):.0f} s left"

    def with_time(self, line: str) -> str:
        """A line, with the time left if it is known."""
        return ", ".join(filter(None, (line, self.time_left)))

    def say(self, line: str) -> None:
        """Say it in a line everywhere, with how far the run is."""
        place = self.with_time(f"{self._done} of {self.total} {self.what}")
        self.console.print(f"{line} ({place})", markup=False, soft_wrap=True)

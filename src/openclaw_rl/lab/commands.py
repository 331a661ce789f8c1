"""What commands that work for minutes share: progress, Ctrl-C in order, files and folders, the error of a group."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from openclaw_rl.errors import UserError

T = TypeVar("T")

#: With fewer cases done, there is no estimate.
MIN_CASES = 5
#: Without a terminal, a line is printed after this many cases or sessions.
LINE_INTERVAL = 10
#: What stops a command.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_stoppable(work: Coroutine[Any, Any, T], console: Console) -> T | None:
    """Do work that a user may end early; None if they did. Of a group of errors, the first is raised.

    Ctrl-C stops it and its servers in order, without an error; once more, at once, also while this process ends:
    servers stop when it is gone. SIGTERM acts like Ctrl-C from here on, also afterwards.
    """
    is_pressed = False
    tell: Callable[[], object] = do_nothing

    # No handler of the event loop: those are gone before the process is.
    def press(*_: object) -> None:
        nonlocal is_pressed
        if is_pressed:
            os._exit(128 + signal.SIGINT)
        is_pressed = True
        tell()

    async def watched() -> T:
        nonlocal tell
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def stop() -> None:
            console.print("Stopping … (Ctrl-C again: at once)")
            if task:
                task.cancel()

        tell = partial(loop.call_soon_threadsafe, stop)
        if is_pressed:
            tell()
        try:
            return await work
        finally:
            tell = do_nothing

    for number in SIGNALS:
        signal.signal(number, press)
    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        console.print("Stopped.")
        return None
    except ExceptionGroup as errors:
        raise first(errors) from None
    finally:
        if not is_pressed:
            for number in SIGNALS:
                signal.signal(number, signal.default_int_handler)


def do_nothing() -> None: ...


def check_writable(path: Path) -> None:
    """Check that a file can be written before anything is measured, without changing it. Raises UserError."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
    if is_new:
        path.resolve().unlink()


def first(errors: BaseException) -> BaseException:
    """The first error in a group of errors."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


def write_text(path: Path, text: str) -> None:
    """Write a file and create its folders. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def new_folder(wanted: Path) -> Path:
    """Make this folder; if there is one already, the first of NAME-2, NAME-3, … that does not exist."""
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def waiting_turns(turns: int, needed: int) -> str:
    """That turns wait for a training step which needs more of them; empty if none does."""
    if not turns:
        return ""
    wait = "1 judged turn waits" if turns == 1 else f"{turns} judged turns wait"
    return f"{wait} for the next training step, which needs {needed}"


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

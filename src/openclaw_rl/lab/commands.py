"""What commands that work for minutes share: Ctrl-C in order, progress, files and folders, the error of a group."""

import contextlib
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from openclaw_rl.errors import UserError


@contextlib.contextmanager
def stoppable(console: Console) -> Iterator[None]:
    """Work that a user may end early: Ctrl-C stops it and its servers in order, without an error.

    SIGTERM acts like Ctrl-C from here on, also afterwards.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console.print("Stopped.")


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


@contextlib.contextmanager
def raising_first() -> Iterator[None]:
    """Raise the first error of a group alone."""
    try:
        yield
    except ExceptionGroup as errors:
        raise first(errors) from None


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


def progress_bar(console: Console) -> Progress:
    """A bar with a count and the field `note`. It is shown only in a terminal, and disappears at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def print_without_bar(console: Console, line: str) -> None:
    """Print a line of progress where no bar shows it."""
    if not console.is_terminal:
        console.print(Text(line), soft_wrap=True)

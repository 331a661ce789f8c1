"""What commands that work for minutes share: Ctrl-C in order, files that can be written, the error of a group."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

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


def write_text(path: Path, text: str) -> None:
    """Write a file and create its folders. Raises UserError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None

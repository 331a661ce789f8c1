"""What commands that work for minutes share: Ctrl-C in order, files and folders, the error of a group."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from openclaw_rl.errors import UserError

T = TypeVar("T")

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

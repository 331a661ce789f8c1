"""Where commands and the server write to."""

import os
import sys

from rich.console import Console
from rich.progress import Progress

#: Of what is not a terminal, unless COLUMNS says it.
WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """Piped into a file, lines keep their width instead of being cut to a terminal's."""
    given = os.environ.get("COLUMNS", "")
    known = on_terminal(stderr=stderr) or (given.isdigit() and int(given) > 0)
    return Console(stderr=stderr, width=None if known else WIDTH)


def on_terminal(*, stderr: bool = False) -> bool:
    return (sys.stderr if stderr else sys.stdout).isatty()


def progress() -> Progress:
    """A line that shows how far something is and goes when it is done; nothing at all off a terminal."""
    return Progress(console=console(stderr=True), transient=True, disable=not on_terminal(stderr=True))

"""How commands and the server write to a terminal or a file."""

import os
import sys

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

#: Width of the output, in columns, where it is not a terminal and COLUMNS is not set.
WIDTH = 160


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut lines to a terminal's width where the output is a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    known = on_terminal(stderr=stderr) or (columns.isdigit() and int(columns) > 0)
    return Console(stderr=stderr, width=None if known else WIDTH)


def on_terminal(*, stderr: bool = False) -> bool:
    return (sys.stderr if stderr else sys.stdout).isatty()


def progress() -> Progress:
    """A progress bar that disappears at the end. It is shown only on a terminal."""
    return Progress(console=console(stderr=True), transient=True, disable=not on_terminal(stderr=True))


def print_titled(out: Console, title: str, table: Table) -> None:
    """Print a table below its title. Unlike rich's own title, it is not wrapped, so a path in it can be copied."""
    out.print(Text(title, style="table.title"), soft_wrap=True)
    out.print(table)

"""How commands and the server write to a terminal or a file."""

import logging
import os
import re
import sys
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.logging import RichHandler
from rich.progress import Progress
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

#: Width of the output, in columns, where it is not a terminal and COLUMNS is not set.
WIDTH = 160
#: The time that is left follows from the pace of this long: a step of training can take a minute.
PACE_SECONDS = 600
#: Control characters other than tab and newline, and characters that reverse the direction of the text after them.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

#: A word, or the white space between two.
WORDS = re.compile(r"\s+|\S+")


def printable(text: str) -> str:
    """A text without characters that move the cursor, change colours or do anything else to a terminal."""
    return CONTROL_CHARACTERS.sub("", text)


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


class SafeConsole(Console):
    """A console that prints no control characters of the texts it is given; only styles can change colours.

    Clients, models, judges and files choose many of the texts that commands print.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console(*, stderr: bool = False) -> SafeConsole:
    """A console that does not cut lines to a terminal's width where the output is a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    known = on_terminal(stderr=stderr) or (columns.isdigit() and int(columns) > 0)
    return SafeConsole(stderr=stderr, width=None if known else WIDTH)


def say(text: str, style: str = "") -> None:
    """Print a text as it is: nothing in it is markup, and it is not wrapped, so a path in it can be copied."""
    console().print(Text(text, style=style), soft_wrap=True)


def on_terminal(*, stderr: bool = False) -> bool:
    return (sys.stderr if stderr else sys.stdout).isatty()


def agrees(question: str) -> bool:
    """Ask whoever sits at the terminal. Anything but y or yes means no, and so does the end of the input."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


class WordWriter:
    """Writes text in pieces, and breaks lines only between words. Without a width, lines are never broken.

    A word is shown when the blank after it is known, or at the end.
    """

    def __init__(self, out: Console, width: int | None) -> None:
        self._out = out
        self._width = width
        self._column = 0
        self._word = ""
        self._style = ""

    def write(self, text: str, style: str = "") -> None:
        if text and style != self._style:
            self._flush()
            self._style = style
        for part in WORDS.findall(text):
            if not part.isspace():
                self._word += part
                continue
            self._flush()
            # A blank behind a full line would begin the next one, and the word after it another.
            if self._width is None or "\n" in part or self._column < self._width:
                self._put(part)

    def end(self) -> None:
        """Show what is left, and end the line."""
        self._flush()
        self._out.print()

    def _flush(self) -> None:
        if self._width is not None and self._column and self._column + cell_len(self._word) > self._width:
            self._put("\n")
        self._put(self._word)
        self._word = ""

    def _put(self, text: str) -> None:
        if not text:
            return
        line = text.rpartition("\n")[2]
        self._column = cell_len(line) + (0 if "\n" in text else self._column)
        self._out.print(Text(text, style=self._style), end="", soft_wrap=True)


def progress() -> Progress:
    """A progress bar that disappears at the end. It is shown only on a terminal."""
    return Progress(
        console=console(stderr=True),
        transient=True,
        disable=not on_terminal(stderr=True),
        speed_estimate_period=PACE_SECONDS,
    )


def print_titled(out: Console, title: str, table: Table) -> None:
    """Print a table below its title. Unlike rich's own title, it is not wrapped, so a path in it can be copied."""
    out.print(Text(title, style="table.title"), soft_wrap=True)
    out.print(table)


#: The terminal for the log; the progress line below it uses the same console.
log_console = SafeConsole(stderr=True)
#: The format of a log line in a file or a pipe. It has a date.
LINE_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class OneLineFormatter(logging.Formatter):
    """Writes a message on one line and without control characters, whatever a client put into it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join(super().formatMessage(record).splitlines())

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def start_logging(level: str) -> None:
    """Log to stderr: wrapped on a terminal, one line per message elsewhere."""
    if on_terminal(stderr=True):
        handler = RichHandler(console=log_console, show_path=False, omit_repeated_times=False)
        logging.basicConfig(level=level.upper(), format="%(message)s", datefmt="%H:%M:%S", handlers=[handler])
    else:
        lines = logging.StreamHandler()
        lines.setFormatter(OneLineFormatter(LINE_FORMAT, "%Y-%m-%d %H:%M:%S"))
        logging.basicConfig(level=level.upper(), handlers=[lines])
    # Otherwise every request to Hugging Face would be logged.
    for noisy in ("httpx", "httpcore", "filelock", "uvicorn", "tinker"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))

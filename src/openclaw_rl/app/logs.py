"""Where the log goes."""

import logging

from rich.console import Console
from rich.logging import RichHandler

from openclaw_rl.terminal import on_terminal

#: Where the log goes on a terminal, with a progress line below it.
console = Console(stderr=True)
#: A line of the log elsewhere, with a date, so that other programs can read it.
PLAIN_LINE = "%(asctime)s %(levelname)-7s %(message)s"


def start_logging(level: str) -> None:
    """On a terminal lines are wrapped to be read; elsewhere each is one line."""
    if on_terminal(stderr=True):
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
        logging.basicConfig(level=level.upper(), format="%(message)s", datefmt="%H:%M:%S", handlers=[handler])
    else:
        logging.basicConfig(level=level.upper(), format=PLAIN_LINE, datefmt="%Y-%m-%d %H:%M:%S")
    # Every request to the Hub would be a line of its own.
    for noisy in ("httpx", "httpcore", "filelock", "uvicorn", "tinker"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))

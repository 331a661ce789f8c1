"""The log on stderr."""

import logging

from rich.console import Console
from rich.logging import RichHandler

from openclaw_rl.terminal import on_terminal

#: The terminal for the log; the progress line below it uses the same console.
console = Console(stderr=True)
#: The format of a log line in a file or a pipe. It has a date.
PLAIN_LINE = "%(asctime)s %(levelname)-7s %(message)s"


def start_logging(level: str) -> None:
    """Log to stderr: wrapped on a terminal, one line per message elsewhere."""
    if on_terminal(stderr=True):
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
        logging.basicConfig(level=level.upper(), format="%(message)s", datefmt="%H:%M:%S", handlers=[handler])
    else:
        logging.basicConfig(level=level.upper(), format=PLAIN_LINE, datefmt="%Y-%m-%d %H:%M:%S")
    # Otherwise every request to Hugging Face would be logged.
    for noisy in ("httpx", "httpcore", "filelock", "uvicorn", "tinker"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))

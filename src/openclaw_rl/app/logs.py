"""The log on stderr."""

import logging

from rich.logging import RichHandler

from openclaw_rl.terminal import SafeConsole, on_terminal, printable

#: The terminal for the log; the progress line below it uses the same console.
console = SafeConsole(stderr=True)
#: The format of a log line in a file or a pipe. It has a date.
PLAIN_LINE = "%(asctime)s %(levelname)-7s %(message)s"


class PlainFormatter(logging.Formatter):
    """Writes a message on one line and without control characters, whatever a client put into it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join(super().formatMessage(record).splitlines())

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def start_logging(level: str) -> None:
    """Log to stderr: wrapped on a terminal, one line per message elsewhere."""
    if on_terminal(stderr=True):
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
        logging.basicConfig(level=level.upper(), format="%(message)s", datefmt="%H:%M:%S", handlers=[handler])
    else:
        plain = logging.StreamHandler()
        plain.setFormatter(PlainFormatter(PLAIN_LINE, "%Y-%m-%d %H:%M:%S"))
        logging.basicConfig(level=level.upper(), handlers=[plain])
    # Otherwise every request to Hugging Face would be logged.
    for noisy in ("httpx", "httpcore", "filelock", "uvicorn", "tinker"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))

"""Where commands write to."""

import sys

from rich.console import Console

#: Of what is not a terminal.
WIDTH = 160


def console() -> Console:
    """Piped into a file, lines keep their width instead of being cut to a terminal's."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)

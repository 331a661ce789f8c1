"""Ctrl-C and SIGTERM while a server starts: either ends it, quietly."""

import signal
from types import FrameType


class Start:
    """Both signals raise KeyboardInterrupt from its creation on, until the server takes them over.

    What they raise can be lost in other people's code, so `go_on` raises it once more.
    """

    def __init__(self) -> None:
        self._ended = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ended = True
        raise KeyboardInterrupt

    def go_on(self) -> None:
        """Raises KeyboardInterrupt if a signal has come."""
        if self._ended:
            raise KeyboardInterrupt

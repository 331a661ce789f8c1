"""Handles Ctrl-C and SIGTERM while a server starts: either stops it without a traceback."""

import asyncio
import signal
from types import FrameType
from typing import Any


class Start:
    """Handles both signals, by raising KeyboardInterrupt, until the server takes them over.

    Library code may swallow that exception, so `go_on` checks again whether a signal has come.
    """

    def __init__(self) -> None:
        self.is_over = False
        """Whether the start is over and the server serves."""
        self._ended = False
        self._task: asyncio.Task[Any] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ended = True
        if self._task is None:
            raise KeyboardInterrupt
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)

    def enter_loop(self) -> None:
        """From now on cancel the running task instead: an exception raised in an event loop leaves a traceback."""
        self._task = asyncio.current_task()

    def go_on(self) -> None:
        """End the start. Raises CancelledError if a signal has come."""
        if self._ended:
            raise asyncio.CancelledError
        self.is_over = True

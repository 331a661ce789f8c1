"""Ctrl-C and SIGTERM while a server starts: either ends it, quietly."""

import asyncio
import signal
from types import FrameType
from typing import Any


class Start:
    """Takes both signals from its creation on, until the server does: they raise KeyboardInterrupt.

    What they raise can be lost in other people's code, so it is remembered for `go_on`.
    """

    def __init__(self) -> None:
        self.is_over = False
        """Whether the server has begun to serve."""
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
        """From here on the running task is cancelled instead: raised in an event loop, it leaves a traceback."""
        self._task = asyncio.current_task()

    def go_on(self) -> None:
        """Raises CancelledError, for that task, if a signal has come."""
        if self._ended:
            raise asyncio.CancelledError
        self.is_over = True

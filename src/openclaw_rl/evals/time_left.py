"""How long the cases that are left take, estimated from those that are done."""

import time
from collections.abc import Callable

#: With fewer cases done, there is no estimate.
MIN_CASES = 5


class TimeLeft:
    """The time left of several tasks whose cases take longer the longer their answers may be.

    Only the time in which cases are asked is counted, not the start of servers.
    """

    def __init__(self, tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`tokens` is the sum of the longest answers to all cases."""
        self._left, self._done, self._cases, self._seconds = tokens, 0, 0, 0.0
        self._clock = clock
        self._since = clock()

    def begin(self) -> None:
        """Cases are asked from now on."""
        self._since = self._clock()

    def advance(self, tokens: int) -> None:
        """A case is done whose answer could have so many tokens."""
        now = self._clock()
        self._seconds += now - self._since
        self._since = now
        self._left -= tokens
        self._done += tokens
        self._cases += 1

    def __str__(self) -> str:
        """Empty if it cannot be estimated yet, or if nothing is left."""
        if self._cases < MIN_CASES or self._left <= 0:
            return ""
        seconds = self._seconds * self._left / self._done
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {max(1, seconds):.0f} s left"

"""Stops calling a judge that is down, and tries from time to time whether it is back."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from openclaw_rl.judge.judges.base import TIMED_OUT, JudgeDown, JudgeFailed

#: Failures in a row after which a judge counts as down.
FAILURES = 3
#: Seconds of the first and the longest pause. Each pause is twice as long as the one before.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0

T = TypeVar("T")


class Breaker:
    """A circuit breaker.

    - Closed: every call passes.
    - Open: every call is refused until the pause is over. Then one trial call passes, and its result decides.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        first_pause: float = FIRST_PAUSE,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        self._clock = clock
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._failures = 0
        self._pause = first_pause
        self._until = 0.0
        self._trying = False
        self.reason: str | None = None
        """Why it is open; None while it is closed."""
        self.answered = 0
        """How many calls the judge has answered."""

    @property
    def wait(self) -> float:
        """Seconds until the next trial call."""
        return max(0.0, self._until - self._clock())

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask, unless the breaker is open: then raise JudgeDown. Also raises what `ask` raises."""
        trial = self.reason is not None
        if self.reason is not None and (self._trying or self.wait):
            raise JudgeDown(self.reason, self.wait)
        self._trying = trial
        try:
            result = await ask()
        except JudgeDown as error:
            self._failed(str(error), error.retry_after, trial)
            raise
        except TimeoutError as error:
            self._failed(str(error) or TIMED_OUT, 0.0, trial)
            raise
        except JudgeFailed:
            self._answered()  # the judge works, only not on this turn
            raise
        finally:
            if trial:
                self._trying = False
        self._answered()
        return result

    def _answered(self) -> None:
        self._failures = 0
        self._pause = self._first_pause
        self.reason = None
        self.answered += 1

    def _failed(self, reason: str, retry_after: float, trial: bool) -> None:
        self._failures += 1
        if self.reason is not None and not trial:
            # This call began before the breaker opened. It may only make the pause longer.
            self._until = max(self._until, self._clock() + retry_after)
        elif self._failures >= FAILURES or retry_after:
            self.reason = reason
            self._until = self._clock() + max(self._pause, retry_after)
            self._pause = min(self._longest_pause, 2 * self._pause)

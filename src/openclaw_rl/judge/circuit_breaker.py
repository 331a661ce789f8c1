"""Leaves a judge alone that is down, and looks from time to time whether it is back."""

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from openclaw_rl.judge.errors import JudgeDown, JudgeFailed

#: So many failures in a row mean that the judge is down, not that a request was unlucky.
FAILURES = 3
#: The first pause, and the longest one: each is twice as long as the one before.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0

T = TypeVar("T")


class Breaker:
    """Closed: everything passes. Open: everything is refused until a pause is over, then one trial passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._until = 0.0
        self._trying = False
        self.reason = ""
        """Why it is open; empty while it is closed."""
        self.answered = 0
        """How often the judge has answered."""

    @property
    def wait(self) -> float:
        """Seconds until it is worth trying again."""
        return max(0.0, self._until - self._clock())

    async def call(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask, unless the judge is left alone. Raises JudgeDown then, and whatever `ask` raises."""
        trial = bool(self.reason)
        if trial and (self._trying or self.wait):
            raise JudgeDown(self.reason, self.wait)
        self._trying = trial
        try:
            result = await ask()
        except JudgeDown as error:
            self._failed(str(error), error.retry_after, trial)
            raise
        except TimeoutError:
            self._failed("the judge does not answer in time", 0.0, trial)
            raise
        except JudgeFailed:
            self._answered()  # it is there; it only could not deal with this
            raise
        finally:
            if trial:
                self._trying = False
        self._answered()
        return result

    def _answered(self) -> None:
        self._failures, self._pause, self.reason = 0, FIRST_PAUSE, ""
        self.answered += 1

    def _failed(self, reason: str, retry_after: float, trial: bool) -> None:
        self._failures += 1
        if self.reason and not trial:
            # It was under way when the judge went away, and says nothing new, or only when to come back.
            self._until = max(self._until, self._clock() + retry_after)
        elif self._failures >= FAILURES or retry_after:
            self.reason = reason
            self._until = self._clock() + max(self._pause, retry_after)
            self._pause = min(LONGEST_PAUSE, 2 * self._pause)

"""How busy the server was in the last minute."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

WINDOW_SECONDS = 60
#: The first-token times that the median is taken of, at most.
MAX_TIMES = 500


@dataclass(frozen=True, slots=True)
class Activity:
    """The last minute in numbers."""

    requests: int
    """That ended."""
    tokens_per_second: float
    """Sampled, on average over the minute."""
    first_token_seconds: float | None
    """The median from a request's arrival to its first token; None without a request."""


class RecentActivity:
    """Counts requests and tokens by the second, and keeps the last minute. To be used on one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, list[int]]] = deque()
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_TIMES)

    def add_first_token(self, seconds: float) -> None:
        self._first_tokens.append((self._clock(), seconds))

    def add_tokens(self, count: int) -> None:
        self._now()[1] += count

    def add_request(self) -> None:
        self._now()[0] += 1

    def read(self) -> Activity:
        self._forget_old()
        now = self._clock()
        times = [seconds for moment, seconds in self._first_tokens if now - moment <= WINDOW_SECONDS]
        tokens = sum(counts[1] for _, counts in self._seconds)
        return Activity(
            sum(counts[0] for _, counts in self._seconds), tokens / WINDOW_SECONDS, median(times) if times else None
        )

    def _now(self) -> list[int]:
        """The counters of this second: requests and tokens."""
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._forget_old()
            self._seconds.append((second, [0, 0]))
        return self._seconds[-1][1]

    def _forget_old(self) -> None:
        oldest = int(self._clock()) - WINDOW_SECONDS
        while self._seconds and self._seconds[0][0] <= oldest:
            self._seconds.popleft()

"""The server's Prometheus metrics, and how busy it was in the last minute."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from openclaw_rl.engines.base import EngineStats
from openclaw_rl.types import Continuation, TurnKind

#: In seconds: from a cached prompt on a GPU to a long prompt on a laptop.
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
#: How long the server remembers how busy it was.
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


class ServerMetrics:
    """The counters of one server, in a registry that no other server shares."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentActivity()
        requests = self._counter("openclaw_requests", "Chat requests by how they ended.", "status")
        self.requests = {status: requests.labels(status) for status in ("ok", "cancelled", "failed", "refused")}
        tokens = self._counter("openclaw_tokens", "Tokens: prompt, cached (part of prompt), completion.", "kind")
        self.prompt_tokens = tokens.labels("prompt")
        self.cached_tokens = tokens.labels("cached")
        self.completion_tokens = tokens.labels("completion")
        self.first_token = self._latency(
            "openclaw_time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.duration = self._latency("openclaw_request_seconds", "From a request's arrival to its last token.")
        captured = self._counter("openclaw_captured_turns", "Turns recorded, main and side.", "kind")
        self.captured_turns = {kind: captured.labels(kind) for kind in TurnKind}
        self.lost_turns = Counter(
            "openclaw_lost_turns", "Turns served that could not be recorded.", registry=self.registry
        )
        continuations = self._counter("openclaw_continuations", "How prompts continue recorded turns.", "kind")
        self.continuations = {kind: continuations.labels(kind) for kind in Continuation}
        self.gauge("openclaw_active_sequences", "Sequences being sampled.", lambda: stats().active)
        self.gauge("openclaw_queued_sequences", "Sequences waiting to be sampled.", lambda: stats().waiting)
        self.gauge("openclaw_engine_ready", "1 when the engine is ready.", lambda: stats().ready)
        self.gauge(
            "openclaw_engine_servers_up",
            "Inference servers of other projects that are up.",
            lambda: sum(running is not None for running in stats().servers.values()),
        )
        self.gauge("openclaw_engine_restarts", "Times the engine's worker was restarted.", lambda: stats().restarts)

    def _counter(self, name: str, doc: str, label: str) -> Counter:
        return Counter(name, doc, [label], registry=self.registry)

    def _latency(self, name: str, doc: str) -> Histogram:
        return Histogram(name, doc, buckets=LATENCY_BUCKETS, registry=self.registry)

    def gauge(self, name: str, doc: str, read: Callable[[], float]) -> None:
        Gauge(name, doc, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self.registry)

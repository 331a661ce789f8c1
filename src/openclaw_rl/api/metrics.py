"""The server's Prometheus metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from openclaw_rl.api.recent import RecentActivity
from openclaw_rl.engines.base import EngineStats
from openclaw_rl.types import Continuation, TurnKind

#: In seconds: from a cached prompt on a GPU to a long prompt on a laptop.
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class ServerMetrics:
    """The counters of one server, in a registry of its own."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.recent = RecentActivity()
        requests = self._counter("openclaw_requests", "Chat requests by how they ended.", "status")
        self.requests = {status: requests.labels(status) for status in ("ok", "cancelled", "failed", "refused")}
        tokens = self._counter("openclaw_tokens", "Tokens: prompt, cached (part of prompt), completion.", "kind")
        self.prompt_tokens, self.cached_tokens = tokens.labels("prompt"), tokens.labels("cached")
        self.completion_tokens = tokens.labels("completion")
        self.first_token = Histogram(
            "openclaw_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "openclaw_request_seconds",
            "From a request's arrival to its last token.",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
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

    def gauge(self, name: str, doc: str, read: Callable[[], float]) -> None:
        Gauge(name, doc, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self.registry)

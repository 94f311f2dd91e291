"""What a server counts, as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .engine_pool import EnginePool

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServerMetrics:
    """Of one server; for one thread."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Counter(
            "rlhfspec_serve_requests", "requests answered", ["route", "status"], registry=own
        )
        self._seconds = Histogram(
            "rlhfspec_serve_request_seconds",
            "until an answer begins",
            ["route"],
            buckets=_SECONDS,
            registry=own,
        )
        self._responses = Counter("rlhfspec_serve_responses", "responses generated", registry=own)
        self._tokens = Counter("rlhfspec_serve_tokens", "tokens of responses", ["kind"], registry=own)
        self._open = Gauge("rlhfspec_serve_open_responses", "running and waiting", registry=own)
        self._instances = Gauge("rlhfspec_serve_instances", "living instances", registry=own)
        self._version = Gauge("rlhfspec_serve_weight_version", "that instances decode from", registry=own)
        self._acceptance = Gauge(
            "rlhfspec_serve_acceptance_rate", "accepted of verified draft tokens", registry=own
        )

        self._decoded = Gauge(
            "rlhfspec_serve_decoded_tokens", "by all instances, given up ones too", registry=own
        )

    def note_request(self, route: str, status: int, seconds: float) -> None:
        """One request was answered, or its stream begun."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def note_response(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """One response has ended."""
        self._responses.inc()
        self._tokens.labels("prompt").inc(num_prompt_tokens)
        self._tokens.labels("generated").inc(num_tokens)

    def text(self, pool: EnginePool) -> str:
        """All of it, and how the pool stands."""
        self._open.set(pool.num_open)
        self._instances.set(pool.num_instances)
        self._version.set(pool.weight_version)
        self._decoded.set(pool.stats.num_emitted_tokens)
        self._acceptance.set(pool.stats.acceptance_rate)
        return generate_latest(self._registry).decode()

"""Prometheus metrics of one app, in a registry of its own. No label takes a value that a client can invent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "diffusion_rl"
LATENCY_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
GAUGES = ("requests_in_engine", "samples_waiting", "samples_running")
PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What `/metrics` shows: counts of the HTTP side, and the engine's own as they were when last asked for."""

    def __init__(self, *, max_batch_size: int, restarts: Callable[[], int], ready: Callable[[], bool]) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{PREFIX}_http_requests", "HTTP requests by route and status", ["route", "status"], registry=self._registry
        )
        self._latency = Histogram(
            f"{PREFIX}_http_request_seconds",
            "From the request's arrival to the last byte of its reply",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self.rollouts_in_flight = Gauge(
            f"{PREFIX}_rollouts_in_flight",
            "Rollout requests whose reply is not sent completely",
            registry=self._registry,
        )
        self.reply_bytes_in_flight = Gauge(
            f"{PREFIX}_reply_bytes_in_flight",
            "Length of the replies that are not sent completely",
            registry=self._registry,
        )
        self._engine = _EngineCollector(max_batch_size, restarts, ready)
        self._registry.register(self._engine)

    def request_finished(self, route: str, status: int, seconds: float) -> None:
        """Counts one HTTP request."""
        self._requests.labels(route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def page(self, stats: Mapping[str, float]) -> bytes:
        """The page in Prometheus' text format, with these statistics of the engine."""
        self._engine.stats = dict(stats)
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's counters begin again at 0 with each of its lives, which Prometheus' `rate` knows how to take."""

    def __init__(self, max_batch_size: int, restarts: Callable[[], int], ready: Callable[[], bool]) -> None:
        self.stats: dict[str, float] = {}
        self._max_batch_size = max_batch_size
        self._restarts = restarts
        self._ready = ready

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily(f"{PREFIX}_engine_up", "1 if the engine takes requests", value=float(self._ready()))
        yield CounterMetricFamily(f"{PREFIX}_engine_restarts", "Restarts of the engine process", value=self._restarts())
        for name, value in sorted(self.stats.items()):
            family = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield family(f"{PREFIX}_engine_{name}", f"The engine's {name.replace('_', ' ')}", value=value)
        if self.stats.get("steps"):
            occupancy = self.stats["evaluations"] / self.stats["steps"] / self._max_batch_size
            yield GaugeMetricFamily(
                f"{PREFIX}_engine_batch_occupancy", "Samples a step, as a share of max_batch_size", value=occupancy
            )

"""Prometheus metrics of one app, in a registry of its own. No label takes a value that a client can invent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LATENCY_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
PAGE_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Derive = Callable[[Mapping[str, float]], Mapping[str, float]]


class Metrics:
    """What `/metrics` shows: counts of the HTTP side, and the engine's own as they were when last asked for."""

    def __init__(
        self,
        prefix: str,
        *,
        gauges: Collection[str],
        restarts: Callable[[], int],
        ready: Callable[[], bool],
        derive: Derive = lambda stats: {},
    ) -> None:
        """`gauges`: which of the engine's statistics are no counters. `derive`: further gauges, from the statistics."""
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{prefix}_http_requests", "HTTP requests by route and status", ["route", "status"], registry=self._registry
        )
        self._latency = Histogram(
            f"{prefix}_http_request_seconds",
            "From the request's arrival to the last byte of its reply",
            ["route"],
            buckets=LATENCY_BUCKETS_S,
            registry=self._registry,
        )
        self._engine = _EngineCollector(prefix, frozenset(gauges), restarts, ready, derive)
        self._registry.register(self._engine)

    def gauge(self, name: str, what: str) -> Gauge:
        """A further number on the page."""
        return Gauge(f"{self._prefix}_{name}", what, registry=self._registry)

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

    def __init__(
        self,
        prefix: str,
        gauges: frozenset[str],
        restarts: Callable[[], int],
        ready: Callable[[], bool],
        derive: Derive,
    ) -> None:
        self.stats: dict[str, float] = {}
        self._prefix = f"{prefix}_engine"
        self._gauges = gauges
        self._restarts = restarts
        self._ready = ready
        self._derive = derive

    def collect(self) -> Iterable[Metric]:
        prefix = self._prefix
        yield GaugeMetricFamily(f"{prefix}_up", "1 if the engine takes requests", value=float(self._ready()))
        yield CounterMetricFamily(f"{prefix}_restarts", "Restarts of the engine process", value=self._restarts())
        for name, value in sorted(self.stats.items()):
            family = GaugeMetricFamily if name in self._gauges else CounterMetricFamily
            yield family(f"{prefix}_{name}", f"The engine's {name.replace('_', ' ')}", value=value)
        for name, value in sorted(self._derive(self.stats).items()):
            yield GaugeMetricFamily(f"{prefix}_{name}", f"The engine's {name.replace('_', ' ')}", value=value)

"""What is counted, for Prometheus. A registry of its own, so that two services in one process do not mix."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.auth import route_of
from service.engine import Embedded, Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The counters of one service."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "nearsense_requests", "Requests answered.", ("method", "route", "status"), registry=self.registry
        )
        self.request_seconds = Histogram(
            "nearsense_request_duration_seconds",
            "From the first byte of a request to the last of its answer.",
            ("method", "route"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.inputs = Counter("nearsense_inputs", "Texts embedded.", registry=self.registry)
        self.tokens = Counter("nearsense_tokens", "Tokens embedded.", registry=self.registry)
        self.truncated = Counter("nearsense_truncated_inputs", "Texts whose end was cut off.", registry=self.registry)
        self.unknown = Counter("nearsense_unknown_tokens", "Tokens that the vocabulary lacks.", registry=self.registry)
        self.build = Info("nearsense_build", "What is served.", registry=self.registry)

    def count(self, embedded: Embedded) -> None:
        """Count the texts of one request."""
        used = sum(embedded.tokens_used)
        self.inputs.inc(len(embedded.tokens))
        self.tokens.inc(used)
        self.truncated.inc(sum(embedded.truncated))
        pairs = zip(embedded.tokens_used, embedded.unknown_share, strict=True)
        self.unknown.inc(round(sum(tokens * share for tokens, share in pairs)))

    def watch(self, engine: Engine) -> None:
        """Show the state of an engine whenever the metrics are read."""
        self.registry.register(_EngineState(engine))

    def write(self) -> bytes:
        """Give all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineState(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> list[GaugeMetricFamily]:
        """Read the batcher's counters."""
        state = self._engine.state()
        return [
            GaugeMetricFamily("nearsense_queued_requests", "Requests that wait.", value=state.queued_requests),
            GaugeMetricFamily("nearsense_queued_tokens", "Tokens that wait.", value=state.queued_tokens),
            GaugeMetricFamily("nearsense_batches", "Batches done so far.", value=state.batches),
            GaugeMetricFamily(
                "nearsense_last_batch_tokens", "Tokens of the last batch.", value=state.last_batch_tokens
            ),
            GaugeMetricFamily("nearsense_tokens_per_second", "Rate of a worker.", value=state.tokens_per_s),
            GaugeMetricFamily("nearsense_dropped_requests", "Requests that left.", value=state.dropped_requests),
        ]


class Measured:
    """ASGI middleware that counts and times requests.

    Args:
        app: What stands behind.
        metrics: Where to count.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a request, whatever comes of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            # Templates, not paths, and known methods: what clients make up must not become a label.
            route = route_of(scope["method"], scope["path"])
            method, template = (scope["method"], route[0]) if route else ("other", "other")
            self._metrics.requests.labels(method, template, str(status)).inc()
            self._metrics.request_seconds.labels(method, template).observe(time.perf_counter() - start)

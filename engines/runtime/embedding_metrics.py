"""Prometheus series of an engine that embeds or ranks; those it shares with generating engines have the same names."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_WAITS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class EmbeddingMetrics:
    """A registry of its own, so that several engines in one test process do not clash. Updated by the core's thread."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.prompt_tokens = Counter("llamacpp:prompt_tokens", "Prompt tokens computed", registry=registry)
        self.decode_calls = Counter("llamacpp:n_decode", "Calls of llama_decode", registry=registry)
        self.requests = Counter("hydra_engine_requests", "Ended requests by outcome", ["outcome"], registry=registry)
        self.inputs = Counter("hydra_engine_pooled_inputs", "Inputs whose values were computed", registry=registry)
        self.step_inputs = self._histogram("hydra_engine_step_inputs", "Inputs that shared one step", _COUNTS)
        self.queue_seconds = self._histogram("hydra_engine_queue_seconds", "Time in the waiting line", _WAITS_S)
        self.request_seconds = self._histogram(
            "hydra_engine_pooling_seconds", "Time from arrival to the last input's values", _WAITS_S
        )
        self.step_seconds = self._histogram("hydra_engine_step_seconds", "Duration of llama_decode", _STEPS_S)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, registry=self.registry, buckets=buckets)

    def watch(self, running: Callable[[], float], waiting: Callable[[], float]) -> None:
        """Registers the gauges that are read from the core's own state when somebody scrapes."""
        for name, text, function in (
            ("llamacpp:requests_processing", "Requests of which inputs have been computed", running),
            ("llamacpp:requests_deferred", "Requests in the waiting line", waiting),
        ):
            Gauge(name, text, registry=self.registry).set_function(function)

    def text(self) -> bytes:
        return generate_latest(self.registry)

"""Prometheus series of conversations that move to and from this engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from engines.errors import EngineError
from engines.wire_handoff import HandoffAnswer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_PAUSES_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class HandoffMetrics:
    """`direction` is out or in; `kind` live or idle, unknown of one that did not leave; `outcome` ok or an error's code, and of a
    move towards this engine `ended` where it did not come. Used on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._moves = Counter(
            "hydra_engine_handoffs",
            "Ended moves of conversations",
            ["direction", "kind", "outcome"],
            registry=registry,
        )
        self._bytes = Counter(
            "hydra_engine_handoff_bytes",
            "Bytes of moved states that were sent, and those skipped since the target held them",
            ["part"],
            registry=registry,
        )
        self._seconds = Histogram(
            "hydra_engine_handoff_seconds",
            "Duration of moves away from here",
            ["kind"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._pause_seconds = Histogram(
            "hydra_engine_handoff_pause_seconds",
            "From the stop of a running request until its target had everything",
            registry=registry,
            buckets=_PAUSES_S,
        )

    def left(self, answer: HandoffAnswer) -> None:
        self._moves.labels("out", answer.kind, "ok").inc()
        self._bytes.labels("sent").inc(answer.sent_bytes)
        self._bytes.labels("skipped").inc(answer.skipped_bytes)
        self._seconds.labels(answer.kind).observe(answer.seconds)
        if answer.kind == "live":
            self._pause_seconds.observe(answer.pause_ms / 1000)

    def stayed(self, error: BaseException) -> None:
        outcome = error.code if isinstance(error, EngineError) else "broken_off"
        self._moves.labels("out", "unknown", outcome).inc()

    def came(self, *, idle: bool) -> None:
        self._moves.labels("in", "idle" if idle else "live", "ok").inc()

    def ended(self, *, idle: bool) -> None:
        """A move towards this engine, before all of it was there."""
        self._moves.labels("in", "idle" if idle else "live", "ended").inc()

"""Prometheus series of states that leave and enter an engine."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class StateMetrics:
    """`direction` is export or restore, `outcome` ok or an error's code."""

    def __init__(self, registry: CollectorRegistry, shares: Callable[[], float]) -> None:
        self.transfers = Counter(
            "hydra_engine_state_transfers",
            "Ended transfers of slots' states",
            ["direction", "outcome"],
            registry=registry,
        )
        self.bytes = Counter(
            "hydra_engine_state_bytes", "Bytes of states that left or entered", ["direction"], registry=registry
        )
        self.seconds = Histogram(
            "hydra_engine_state_seconds",
            "Duration of successful transfers",
            ["direction"],
            registry=registry,
            buckets=_SECONDS,
        )
        gauge = Gauge(
            "hydra_engine_state_sharing", "1 if this engine shares state, 0 if it refuses to", registry=registry
        )
        gauge.set_function(shares)

"""Prometheus series of an engine's dealings with its host's store."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from engines.errors import EngineError


class ParkMetrics:
    def __init__(self, registry: CollectorRegistry, is_up: Callable[[], float]) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hydra_engine_{name}", text, labels, registry=registry)

        # Reasons: turn (a turn has ended), system (a system prompt), idle, asked, stop.
        self.saved = counter("park_saves", "Snapshots saved to the host's store, by reason", "reason")
        self.freed = counter("parked", "Conversations that were saved and left the engine, by reason", "reason")
        self.resumed = counter("resumed", "Requests whose prompt's beginning came from the store, by place", "place")
        self.resumed_tokens = counter("resumed_tokens", "Prompt tokens that came from the store")
        self.bytes = counter("store_bytes", "Bytes saved, skipped (they were there) and restored", "direction")
        # Outcomes: hit, miss, local (the engine has it itself), slower (than to compute it), away.
        self.lookups = counter("store_lookups", "What became of looking for a prompt in the store", "outcome")
        self.failures = counter("store_failures", "Saves, look-ups and restores that failed", "operation", "cause")
        Gauge("hydra_engine_store_up", "1 while the host's store answers", registry=registry).set_function(is_up)

    def failed(self, operation: str, error: BaseException) -> None:
        cause = error.code if isinstance(error, EngineError) else type(error).__name__
        self.failures.labels(operation, cause).inc()

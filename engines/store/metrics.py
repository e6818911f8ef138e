"""The store's series for Prometheus, read from its books at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from engines.store.store import Store
from engines.store.transfer import Transfer

_HELP = {
    "capacity_bytes": "Bytes that the store may take on tmpfs, headers included",
    "slab_bytes": "Bytes that its slabs have taken",
    "free_bytes": "Bytes of the slabs that no object has",
    "stored_bytes": "Bytes of objects, each once",
    "logical_bytes": "Bytes that manifests name, as often as they do",
    "dedup_ratio": "Bytes named by manifests for each byte that they share",
    "objects": "Objects",
    "logical_keys": "Logical keys that find an object",
    "manifests": "Manifests",
    "sessions": "Sessions with manifests",
    "pinned_bytes": "Bytes of objects that pinned manifests name",
    "leases": "Leases that run",
    "reservations": "Reservations that are being written",
    "dying": "Ranges that wait for a late reader or writer",
    "hits": "Look-ups that found what they asked for",
    "misses": "Look-ups that did not",
    "stored_objects": "Objects written",
    "deduplicated_objects": "Objects that were written and there already",
    "evicted_manifests": "Manifests that gave way when room was short",
    "retired_manifests": "Manifests beyond a session's bounds",
    "orphans_collected": "Objects that no manifest named for too long",
    "reservations_preempted": "Reservations that took too long when room was short",
    "tmpfs_full": "Slabs that tmpfs had no room for",
    "refused_full": "Writes refused for want of room",
    "damaged_objects": "Objects whose bytes had changed in memory",
    "recovered_objects": "Objects found in memory at the start",
    "recovered_manifests": "Manifests found in memory at the start",
    "dropped_at_recovery": "Records found at the start that could not be kept",
    "disk_written": "Manifests copied to disk",
    "disk_recovered": "Manifests read back from disk at the start",
    "disk_errors": "Copies to disk that failed",
    "disk_skipped": "Copies to disk left out because too many waited",
}


class StoreCollector:
    """`hydra_store_*`; registered once with the registry whose text /metrics shows."""

    def __init__(self, store: Store, transfer: Transfer, registry: CollectorRegistry) -> None:
        self._store = store
        self._transfer = transfer
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._store.status()).items():
            yield GaugeMetricFamily(f"hydra_store_{name}", _HELP[name], value=value)
        for name, value in asdict(self._store.counts).items():
            yield CounterMetricFamily(f"hydra_store_{name}", _HELP[name], value=value)
        yield CounterMetricFamily(
            "hydra_store_sent_bytes", "Bytes of objects that left by sendfile", value=self._transfer.sent_bytes
        )

"""What a store's books say: figures for people, and whether they add up."""

from __future__ import annotations

from dataclasses import dataclass

from engines.store.errors import StoreUnusable
from engines.store.extents import pages
from engines.store.manifests import Manifests
from engines.store.objects import Objects, StoredObject
from engines.store.slabs import Slab, Slabs, Slot


@dataclass
class Counts:
    """What happened since the start."""

    hits: int = 0
    misses: int = 0
    stored_objects: int = 0
    deduplicated_objects: int = 0
    evicted_manifests: int = 0
    retired_manifests: int = 0
    orphans_collected: int = 0
    reservations_preempted: int = 0
    tmpfs_full: int = 0
    refused_full: int = 0
    damaged_objects: int = 0
    recovered_objects: int = 0
    recovered_manifests: int = 0
    dropped_at_recovery: int = 0
    disk_written: int = 0
    disk_recovered: int = 0
    disk_errors: int = 0
    disk_skipped: int = 0


@dataclass(frozen=True)
class StoreStatus:
    """`stored_bytes` are objects' bytes, each once; `logical_bytes` what manifests name, as often as they do."""

    capacity_bytes: int
    slab_bytes: int
    free_bytes: int
    stored_bytes: int
    logical_bytes: int
    dedup_ratio: float
    objects: int
    logical_keys: int
    manifests: int
    sessions: int
    pinned_bytes: int
    leases: int
    reservations: int
    dying: int


class BooksDiffer(StoreUnusable):
    """Two books of the store contradict each other: a fault of ours, since damage to the memory is taken out before."""


def status_of(capacity_bytes: int, slabs: Slabs, objects: Objects, manifests: Manifests) -> StoreStatus:
    named = sum(found.size for found in objects.by_digest.values() if found.refs)
    logical = sum(stored.manifest.total_size for stored in manifests)
    pinned = {found for stored in manifests if stored.manifest.pinned for found in stored.objects}
    return StoreStatus(
        capacity_bytes=capacity_bytes,
        slab_bytes=slabs.size_bytes,
        free_bytes=slabs.free_bytes,
        stored_bytes=sum(found.size for found in objects.by_digest.values()),
        logical_bytes=logical,
        dedup_ratio=logical / named if named else 1.0,
        objects=len(objects.by_digest),
        logical_keys=objects.keys,
        manifests=len(manifests),
        sessions=manifests.sessions,
        pinned_bytes=sum(found.size for found in pinned),
        leases=len(objects.leases),
        reservations=len(objects.reservations),
        dying=objects.dying,
    )


def check_books(slabs: Slabs, objects: Objects, manifests: Manifests) -> None:
    """Walks over everything: after a recovery, and in tests after every step. Raises BooksDiffer."""
    taken: dict[Slab, list[Slot]] = {slab: [] for slab in slabs.slabs}
    slots = [found.slot for found in objects.by_digest.values()]
    slots += [stored.record.slot for stored in manifests]
    slots += [reservation.slot for reservation in objects.reservations.values()]
    for slot in [*slots, *objects.dying_slots()]:
        taken[slot.slab].append(slot)
    for slab, found_slots in taken.items():
        _check_slab(slab, found_slots)
    counted: dict[StoredObject, int] = {}
    for stored in manifests:
        for found in stored.distinct:
            counted[found] = counted.get(found, 0) + 1
            _require(not found.gone, f"{stored.name} names an object that is gone")
    for found in objects.by_digest.values():
        _require(found.refs == counted.get(found, 0), f"{found.digest.hex()} has {found.refs} references")


def _check_slab(slab: Slab, slots: list[Slot]) -> None:
    """Just these ranges and records are taken, none of them twice."""
    end = used = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        _require(slot.offset >= end, f"two objects lie at offset {slot.offset} of {slab.path.name}")
        end = slot.offset + pages(slot.length)
        used += pages(slot.length)
    _require(used + slab.free.free_bytes == len(slab.data), f"{slab.path.name} has lost room")
    _require(len(slots) + len(slab.free_records) == slab.records, f"{slab.path.name} has lost records")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BooksDiffer(otherwise)

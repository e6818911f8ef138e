"""The store against a model in plain Python: random saves, reads, leases, deletions, evictions, flipped bits, time and crashes.

A few hundred steps in the normal run, 10^5 under `make soak`. What must hold: a read gives the bytes of the last save or says
that they are gone; what is leased does not change; the pinned and the leased are never evicted; a crash loses nothing that was
published; the books agree.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engines.store.errors import ObjectDamaged, ObjectNotFound, StoreFull
from engines.store.objects import Lease, Reservation, StoredObject, prove
from tests.engines.store.objects_made import MB, Clock, check, close_all, content, manifest_of, new_store, put, read
from tests.engines.store.store_faults import TABLE

NAMES = [f"kv/{n}" for n in range(12)]
SIZES = [1, 4096, 70_000, 150_000, 400_000, 700_000]
chunk = st.tuples(st.integers(0, 30), st.sampled_from(SIZES))


class StoreModel(RuleBasedStateMachine):
    """`saved` is what the last save of each name was, `leased` what a lease's reader saw when it began."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="test-store-", dir="/dev/shm"))
        self.clock = Clock()
        self.values: dict[str, Any] = {"capacity_bytes": 3 * MB, "slab_bytes": MB + 200_000, "session_manifests": 3}
        self.values["pin_s"] = 1e7
        self.store = new_store(self.folder, self.clock, **self.values)
        self.saved: dict[str, list[bytes]] = {}
        self.pinned: set[str] = set()
        self.leases: list[tuple[Lease | float, list[tuple[StoredObject, bytes]]]] = []
        self.reservations: list[tuple[Reservation, bytes]] = []

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            close_all()
            shutil.rmtree(self.folder)

    # --- what happens ---------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), chunks=st.lists(chunk, min_size=1, max_size=4), pinned=st.booleans())
    def save(self, name: str, chunks: list[tuple[int, int]], pinned: bool) -> None:
        data = [content(number, size) for number, size in chunks]
        self.save_data(name, data, pinned and name in NAMES[:2] and sum(map(len, data)) < 300_000)

    def save_data(self, name: str, data: list[bytes], pinned: bool) -> None:
        try:
            held: list[StoredObject] = []
            for part in data:
                held += self.store.objects.hold([put(self.store, part)])
            try:
                self.store.put_manifest(name, manifest_of(held, pinned=pinned))
            finally:
                self.store.objects.drop(held)
        except StoreFull:
            return
        self.saved[name] = data
        self.pinned.discard(name)
        if pinned:
            self.pinned.add(name)
        assert read(self.store, name) == data

    @rule(first=st.integers(0, 30))
    def save_many(self, first: int) -> None:
        for offset, name in enumerate(NAMES[2:8]):
            self.save_data(name, [content(first + offset, 400_000)], pinned=False)

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        was = self.store.manifests.get(name) is not None
        assert self.store.delete(name) == was
        self.saved.pop(name, None)
        self.pinned.discard(name)

    @rule(name=st.sampled_from(NAMES))
    def look(self, name: str) -> None:
        try:
            TABLE.add("random histories: reads", trials=1, reads_checked=1)
            assert read(self.store, name) == self.saved[name]
        except ObjectNotFound:
            self.saved.pop(name, None)

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([5, 30, 200]))
    def lease(self, name: str, seconds: float) -> None:
        stored = self.store.manifests.get(name)
        if stored is not None:
            seen = [(found, bytes(found.slot.view)) for found in stored.objects]
            self.leases.append((self.store.objects.lease(stored.objects, seconds), seen))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.leases) - 1))
        lease, _ = self.leases[place]
        if isinstance(lease, Lease):
            until = lease.until
            assert self.store.objects.release(lease.ticket) == (until > self.clock())
            del self.leases[place]

    @rule(number=st.integers(0, 30), size=st.sampled_from(SIZES))
    def begin_writing(self, number: int, size: int) -> None:
        try:
            reservation = self.store.reserve(size, "block", f"key/{number}")
        except StoreFull:
            return
        reservation.slot.view[:] = content(number, size)
        self.reservations.append((reservation, content(number, size)))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def end_writing(self, data: st.DataObject) -> None:
        reservation, written = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        try:
            found, new = self.store.publish(reservation, prove(reservation.slot.view))
        except ObjectNotFound:
            return
        if new:
            assert bytes(found.slot.view) == written

    @rule(seconds=st.sampled_from([1, 6, 31, 700]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.store.sweep()

    @rule()
    def crash(self) -> None:
        before = {stored.name: stored.manifest for stored in self.store.manifests}
        self.reservations.clear()
        self.leases = [(end.until if isinstance(end, Lease) else end, seen) for end, seen in self.leases]
        self.store.close()
        self.store = new_store(self.folder, self.clock, **self.values)
        TABLE.add("random histories: crashes", trials=1, faults=1)
        assert {stored.name: stored.manifest for stored in self.store.manifests} == before

    @precondition(lambda self: len(self.store.manifests) > 0)
    @rule(data=st.data())
    def flip_a_bit(self, data: st.DataObject) -> None:
        stored = data.draw(st.sampled_from(list(self.store.manifests)))
        hit = data.draw(st.sampled_from(stored.objects))
        if any(place_of(hit) == place_of(found) for _, seen in self.leases for found, _ in seen):
            return
        hit.slot.view[len(hit.slot.view) // 2] ^= 1
        for other in self.store.manifests.of([hit]):
            self.saved.pop(other.name, None)
            self.pinned.discard(other.name)
        TABLE.add("random histories: flipped bits", trials=1, faults=1)
        try:
            read(self.store, stored.name)
            raise AssertionError("wrong bytes were served")
        except ObjectDamaged:
            assert self.store.manifests.get(stored.name) is None

    # --- what holds -----------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "store"):
            TABLE.add("random histories: steps", trials=1)
            check(self.store)

    @invariant()
    def leased_bytes_do_not_change(self) -> None:
        if not hasattr(self, "store"):
            return
        now = self.clock()
        self.leases = [(e, s) for e, s in self.leases if (e.until if isinstance(e, Lease) else e) > now]
        for _, seen in self.leases:
            for found, data in seen:
                assert bytes(found.slot.view) == data

    @invariant()
    def only_eviction_makes_manifests_go_and_never_the_pinned(self) -> None:
        if not hasattr(self, "store"):
            return
        names = set(self.store.manifests.names(""))
        assert self.pinned <= names
        assert names <= set(self.saved)
        self.saved = {name: data for name, data in self.saved.items() if name in names}


def place_of(found: StoredObject) -> tuple[Path, int]:
    """The same before and after a crash."""
    return found.slot.slab.path, found.slot.offset


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        StoreModel,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


def test_random_histories_agree_with_the_model() -> None:
    run(examples=50, steps=40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_random_steps_agree_with_the_model() -> None:
    run(examples=1300, steps=100)

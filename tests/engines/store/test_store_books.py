"""What the store promises about its memory, on its synchronous core: room, leases, eviction, retention."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.store.errors import (
    DigestMismatch,
    ManifestInvalid,
    ObjectNotFound,
    ObjectTooLarge,
    StoreFull,
)
from engines.store.extents import PAGE_BYTES, FreeRanges
from engines.store.objects import prove
from engines.store.store import Store
from tests.engines.store.objects_made import (
    MB,
    Clock,
    check,
    content,
    hash_of,
    manifest_of,
    new_store,
    put,
    read,
    reopen,
    save,
)


def used_bytes(store: Store) -> int:
    return sum(len(slab.data) for slab in store.slabs.slabs) - store.slabs.free_bytes


# --- deduplication and deletion -------------------------------------------------------------------


def test_equal_bytes_lie_once_and_go_with_the_last_manifest_that_names_them(memory: Path) -> None:
    store = new_store(memory)
    shared, own = content(1, 300_000), content(2, 100_000)
    save(store, "kv/a", [shared])
    before = used_bytes(store)
    save(store, "kv/b", [shared, own])
    assert used_bytes(store) - before <= len(own) + 3 * PAGE_BYTES
    assert store.status().dedup_ratio > 1.5
    store.delete("kv/b")
    assert used_bytes(store) == before
    assert read(store, "kv/a") == [shared]
    store.delete("kv/a")
    assert used_bytes(store) == 0
    assert store.objects.by_digest == {}
    check(store)


def test_an_unchanged_save_writes_nothing(memory: Path) -> None:
    store = new_store(memory)
    chunks = [content(n, 50_000) for n in range(3)]
    save(store, "kv/a", chunks)
    before = (used_bytes(store), store.counts.stored_objects)
    save(store, "kv/a", chunks)
    assert (used_bytes(store), store.counts.stored_objects) == before


def test_a_new_version_takes_the_place_of_the_old_one(memory: Path) -> None:
    store = new_store(memory)
    save(store, "kv/a", [content(1, 50_000), content(2, 5000)])
    save(store, "kv/a", [content(1, 50_000), content(3, 6000)])
    assert read(store, "kv/a") == [content(1, 50_000), content(3, 6000)]
    assert store.objects.find(bytes.fromhex(hash_of(content(2, 5000)))) is None


def test_a_manifest_that_contradicts_what_is_stored_does_not_replace_a_good_one(memory: Path) -> None:
    store = new_store(memory)
    save(store, "kv/a", [content(1, 5000)])
    with pytest.raises(ObjectNotFound):
        store.put_manifest("kv/a", manifest_of([content(2, 10)]))
    body = manifest_of([content(1, 5000)])
    object.__setattr__(body.chunks[0], "size", 4999)
    object.__setattr__(body, "total_size", 4999)
    with pytest.raises(ManifestInvalid):
        store.put_manifest("kv/a", body)
    assert read(store, "kv/a") == [content(1, 5000)]


def test_one_logical_key_names_the_object_that_came_first(memory: Path) -> None:
    store = new_store(memory)
    first = put(store, content(1, 5000), "salt/key")
    assert put(store, content(2, 6000), "salt/key") is first
    # Equal bytes under another tenant's key are the same object, found by both keys.
    assert put(store, content(1, 5000), "other/key") is first
    assert store.present(None, "other/key") is first
    store.objects.remove(first)
    assert store.present(None, "salt/key") is None
    assert store.present(None, "other/key") is None


def test_logical_keys_are_found_again_after_a_restart(memory: Path) -> None:
    store = new_store(memory)
    found = put(store, content(1, 5000), "one")
    put(store, content(1, 5000), "two")
    body = manifest_of([found])
    object.__setattr__(body.chunks[0], "logical_key", "two")
    store.put_manifest("kv/a", body)
    again = reopen(store)
    assert again.present(None, "one") is again.present(None, "two") is not None


# --- room -----------------------------------------------------------------------------------------


def test_the_cap_counts_every_file(memory: Path) -> None:
    store = new_store(memory, capacity_bytes=5 * MB, slab_bytes=2 * MB)
    for number in range(60):
        save(store, f"kv/{number}", [content(number, 200_000)])
        files = sum(path.stat().st_blocks * 512 for path in store.config.folder.iterdir())
        assert files <= store.config.capacity_bytes
    assert store.counts.evicted_manifests > 30
    check(store)


def test_the_least_recently_used_goes_first_and_the_pinned_never(memory: Path) -> None:
    store = new_store(memory, capacity_bytes=5 * MB)
    save(store, "system", [content(0, 500_000)], pinned=True)
    for number in range(1, 5):
        save(store, f"kv/{number}", [content(number, 500_000)])
    store.get("kv/1")
    for number in range(5, 20):
        save(store, f"kv/{number}", [content(number, 500_000)])
        store.get("kv/1")
        assert read(store, "system") == [content(0, 500_000)]
    assert read(store, "kv/1") == [content(1, 500_000)]
    assert store.manifests.get("kv/2") is None


def test_the_order_of_use_survives_a_restart(memory: Path) -> None:
    clock = Clock()
    store = new_store(memory, clock=clock)
    for name in ("a", "b", "c"):
        clock.now += 1
        save(store, name, [content(ord(name), 5000)])
    clock.now += 1
    store.get("a")
    again = reopen(store)
    assert [stored.name for stored in again.manifests] == ["b", "c", "a"]


def test_one_manifest_too_many_makes_the_oldest_go_but_not_what_the_new_one_needs(memory: Path) -> None:
    store = new_store(memory, max_manifests=2)
    for number in range(6):
        save(store, f"kv/{number}", [content(0, 5000), content(number // 3 + 1, 6000)])
        assert read(store, f"kv/{number}") == [content(0, 5000), content(number // 3 + 1, 6000)]
        check(store)
    assert store.manifests.names("") == ["kv/4", "kv/5"]


def test_too_much_that_is_pinned_is_refused(memory: Path) -> None:
    store = new_store(memory, capacity_bytes=5 * MB)
    save(store, "one", [content(1, 2 * MB - 100_000)], pinned=True)
    with pytest.raises(StoreFull, match="pinned"):
        save(store, "two", [content(2, 1 * MB)], pinned=True)


def test_a_full_store_refuses_loudly_and_goes_on(memory: Path) -> None:
    store = new_store(memory, capacity_bytes=3 * MB, slab_bytes=2 * MB)
    lease = store.objects.lease([put(store, content(n, 450_000)) for n in range(4)], 30)
    with pytest.raises(StoreFull):
        save(store, "kv/late", [content(9, 1_500_000)])
    assert store.counts.refused_full == 1
    store.objects.release(lease.ticket)
    check(store)
    with pytest.raises(ObjectTooLarge):
        store.reserve(2 * MB, "block")


def test_reservations_are_preempted_when_late_and_reclaimed_when_forgotten(memory: Path) -> None:
    clock = Clock()
    store = new_store(memory, capacity_bytes=3 * MB, clock=clock)
    late = store.reserve(1_900_000, "block")
    with pytest.raises(StoreFull):
        store.reserve(1_900_000, "block")
    clock.now += 29
    with pytest.raises(StoreFull):
        store.reserve(1_900_000, "block")
    clock.now += 2
    second = store.reserve(1_900_000, "block")
    with pytest.raises(ObjectNotFound):
        store.publish(late, prove(late.slot.view))
    clock.now += 590
    store.sweep()
    assert second.ticket in store.objects.reservations
    clock.now += 20
    store.sweep()
    assert store.objects.reservations == {}
    check(store)


def test_what_no_manifest_names_is_given_up_after_a_while(memory: Path) -> None:
    clock = Clock()
    store = new_store(memory, clock=clock)
    put(store, content(1, 50_000), "asked")
    put(store, content(2, 50_000), "forgotten")
    clock.now += 400
    assert store.present(None, "asked") is not None
    clock.now += 400
    store.sweep()
    assert store.present(None, "asked") is not None
    assert store.present(None, "forgotten") is None
    assert store.counts.orphans_collected == 1


def test_a_digest_that_differs_gives_the_room_back(memory: Path) -> None:
    store = new_store(memory)
    reservation = store.reserve(5000, "block")
    with pytest.raises(DigestMismatch):
        store.publish(reservation, prove(reservation.slot.view), bytes(32))
    assert used_bytes(store) == 0
    check(store)


def test_ranges_join_again_whatever_the_order_of_their_return() -> None:
    ranges = FreeRanges(100)
    taken = [ranges.take(10, from_end=bool(n % 2)) for n in range(10)]
    assert sorted(start for start in taken if start is not None) == list(range(0, 100, 10))
    assert ranges.take(1) is None
    for start in (30, 10, 20, 90, 0, 50, 40, 80, 60, 70):
        ranges.give(start, 10)
    assert (ranges.largest, ranges.free_bytes) == (100, 100)
    assert ranges.take_at(40, 20)
    assert not ranges.take_at(50, 20)
    assert not ranges.take_at(90, 20)


# --- leases ---------------------------------------------------------------------------------------


def test_leased_bytes_stay_where_they_are_whatever_happens_to_the_object(memory: Path) -> None:
    clock = Clock()
    store = new_store(memory, capacity_bytes=3 * MB, clock=clock)
    data = content(1, 900_000)
    save(store, "kv/a", [data])
    (found,) = store.get("kv/a").objects
    lease = store.objects.lease([found], 30)
    store.delete("kv/a")
    assert store.present(found.digest) is None
    for number in range(2, 12):
        save(store, f"kv/{number}", [content(number, 600_000)])
        assert bytes(found.slot.view) == data
    clock.now += 20
    store.objects.extend(lease.ticket, 30)
    store.objects.extend(lease.ticket, 1)
    clock.now += 29
    store.sweep()
    assert store.objects.dying == 1
    clock.now += 2
    store.sweep()
    assert store.objects.dying == 0
    assert not store.objects.release(lease.ticket)
    with pytest.raises(ObjectNotFound):
        store.objects.extend(lease.ticket, 30)
    check(store)


def test_eviction_passes_over_what_is_being_read(memory: Path) -> None:
    store = new_store(memory, capacity_bytes=3 * MB)
    save(store, "kv/read", [content(1, 500_000)])
    lease = store.objects.lease(store.get("kv/read").objects, 30)
    for number in range(2, 12):
        save(store, f"kv/{number}", [content(number, 500_000)])
    assert read(store, "kv/read") == [content(1, 500_000)]
    assert store.objects.release(lease.ticket)
    for number in range(12, 22):
        save(store, f"kv/{number}", [content(number, 500_000)])
    assert store.manifests.get("kv/read") is None


def test_a_reader_of_a_shared_beginning_does_not_keep_every_session_that_has_it(memory: Path) -> None:
    store = new_store(memory, capacity_bytes=3 * MB)
    shared = content(0, 200_000)
    save(store, "kv/read", [shared, content(1, 300_000)])
    lease = store.objects.lease(store.get("kv/read").objects, 30)
    for number in range(2, 20):
        save(store, f"kv/{number}", [shared, content(number, 300_000)])
    assert read(store, "kv/read") == [shared, content(1, 300_000)]
    assert store.counts.evicted_manifests > 10
    assert store.objects.release(lease.ticket)
    check(store)


def test_leases_and_writers_of_a_former_process_are_respected_until_their_time(memory: Path) -> None:
    clock = Clock()
    store = new_store(memory, capacity_bytes=3 * MB, clock=clock)
    data = content(1, 500_000)
    save(store, "kv/a", [data])
    (found,) = store.get("kv/a").objects
    store.objects.lease([found], 60)
    store.delete("kv/a")
    late = store.reserve(700_000, "block")
    late.slot.view[:] = content(2, 700_000)
    again = reopen(store)
    assert again.objects.dying == 2
    with pytest.raises(StoreFull):
        save(again, "kv/b", [content(3, 900_000)])
    assert bytes(found.slot.view) == data
    assert bytes(late.slot.view) == content(2, 700_000)
    clock.now += 61
    again.sweep()
    assert again.objects.dying == 0
    save(again, "kv/b", [content(3, 1_900_000)])
    check(again)


# --- retention ------------------------------------------------------------------------------------


def test_a_session_keeps_its_last_manifests_and_checkpoints(memory: Path) -> None:
    store = new_store(memory, session_manifests=3, session_checkpoints=1)
    save(store, "kv/s/0", [content(0, 5000)], session="s", pinned=True)
    for turn in range(1, 6):
        kinds = ["block", "checkpoint"] if turn % 2 else ["block", "tail"]
        save(store, f"kv/s/{turn}", [content(100, 5000), content(turn, 6000)], session="s", kinds=kinds)
    assert store.manifests.names("kv/") == ["kv/s/0", "kv/s/4", "kv/s/5"]
    assert store.counts.retired_manifests == 3
    check(store)


# --- pins that nobody keeps up --------------------------------------------------------------------


def test_a_pin_that_nobody_used_for_long_gives_way(memory: Path) -> None:
    """Whoever pinned it may be gone: such pins may neither fill the memory nor keep others from pinning."""
    clock = Clock()
    store = new_store(memory, clock, capacity_bytes=5 * MB, pin_s=100)
    save(store, "kv/used", [content(1, 1_000_000)], pinned=True)
    save(store, "kv/left", [content(2, 1_000_000)], pinned=True)
    clock.now += 60
    store.get("kv/used")
    with pytest.raises(StoreFull, match="pinned"):
        save(store, "kv/late", [content(3, 1_000_000)], pinned=True)
    clock.now += 60
    save(store, "kv/late", [content(3, 1_000_000)], pinned=True)
    for number in range(4, 12):
        save(store, f"kv/{number}", [content(number, 900_000)])
    assert store.manifests.get("kv/left") is None
    assert read(store, "kv/used") == [content(1, 1_000_000)]
    assert read(reopen(store), "kv/late") == [content(3, 1_000_000)]

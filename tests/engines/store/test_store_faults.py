"""Flipped bits, evictions against leases and two writers of one key, many times over: a few in the normal run, many under
`make soak`. What they counted stands in the table at the end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from engines.store.client import StoreClient, Writing
from engines.store.errors import ObjectDamaged
from tests.engines.store.objects_made import MB, Clock, check, content, hash_of, new_store, read, reopen, save
from tests.engines.store.store_faults import TABLE
from tests.engines.store.store_process import StoreProcess

SIZES = [1, 5000, 70_000, 300_000]


@pytest.mark.parametrize("trials", [10, pytest.param(3000, marks=pytest.mark.soak)])
def test_a_flipped_bit_is_never_served(memory: Path, trials: int) -> None:
    """Anywhere in an object that two manifests may share, seen by the process that stored it or by the next one."""
    numbers = random.Random(7)
    store = new_store(memory, capacity_bytes=5 * MB)
    checked = wrong = 0
    for trial in range(trials):
        saved = {f"kv/{n}": [content(n, numbers.choice(SIZES)), content(9, 4096)] for n in range(4)}
        for name, chunks in saved.items():
            save(store, name, chunks)
        hit = numbers.choice(store.get(f"kv/{numbers.randrange(4)}").objects)
        bit = numbers.randrange(8 * hit.size)
        hit.slot.view[bit // 8] ^= 1 << bit % 8
        if trial % 2:
            store.close()
            store = reopen(store)
        for name, chunks in saved.items():
            try:
                found = read(store, name) if store.manifests.get(name) else chunks
            except ObjectDamaged:
                continue
            checked += 1
            wrong += found != chunks
        check(store)
    TABLE.add("bit flipped in memory", trials=trials, faults=trials, reads_checked=checked, wrong_bytes=wrong)
    assert wrong == 0


@pytest.mark.parametrize("trials", [6, pytest.param(2000, marks=pytest.mark.soak)])
def test_what_is_leased_stays_while_all_else_is_evicted(memory: Path, trials: int) -> None:
    numbers = random.Random(8)
    clock = Clock()
    store = new_store(memory, clock, capacity_bytes=3 * MB)
    checked = wrong = lost = refused = 0
    for trial in range(trials):
        name, data = "kv/leased", content(trial % 50, 400_000)
        save(store, name, [data])
        (found,) = store.get(name).objects
        lease = store.objects.lease([found], 30)
        gone = numbers.random() < 0.5 and store.delete(name)
        before = store.counts.evicted_manifests
        for number in range(8):
            save(store, f"kv/{number}", [content(60 + number + trial % 7, 500_000)])
        refused += store.counts.evicted_manifests == before
        checked += 1
        wrong += bytes(found.slot.view) != data
        lost += not gone and store.manifests.get(name) is None
        assert store.objects.release(lease.ticket)
        check(store)
    counts = {"reads_checked": checked, "wrong_bytes": wrong, "published_lost": lost}
    TABLE.add("eviction against a lease", trials=trials, faults=trials - refused, **counts)
    assert (wrong, lost, refused) == (0, 0, 0)


@pytest.mark.parametrize("trials", [6, pytest.param(1000, marks=pytest.mark.soak)])
async def test_of_two_writers_of_one_key_both_get_the_first_ones_object(
    memory: Path, tmp_path: Path, trials: int
) -> None:
    """At once, over connections of their own; bytes and their lengths differ, as those of two engines may."""
    wrong = 0

    async def written(client: StoreClient, key: str, data: bytes) -> tuple[str, bool]:
        async with client.writing(len(data), "block", key) as writing:
            if not writing.present:
                _fill(writing, data)
            await asyncio.sleep(0)
            return await writing.commit(), writing.stored

    # Room for all: objects that no manifest names stay for a while.
    with StoreProcess(memory, tmp_path, capacity_bytes=192 * MB, slab_bytes=16 * MB) as store:
        port = store.config.port
        async with StoreClient("127.0.0.1", port) as one, StoreClient("127.0.0.1", port) as two:
            for trial in range(trials):
                key, texts = f"key/{trial}", [content(trial, 60_000), content(trial + 1, 70_000)]
                ends = await asyncio.gather(written(one, key, texts[0]), written(two, key, texts[1]))
                async with one.held(logical_keys=[key]) as held:
                    (place,) = held.places
                    found = bytes(one.slabs.prove(place, held.lease))
                same = {end[0] for end in ends} == {hash_of(found)}
                # Texts come again under the next key, so that a writer may find his own stored already.
                wrong += not same or found not in texts or sum(stored for _, stored in ends) > 1
    TABLE.add("two writers of one key", trials=trials, faults=trials, reads_checked=trials, wrong_bytes=wrong)
    assert wrong == 0


def _fill(writing: Writing, data: bytes) -> None:
    writing.view[:] = data

"""Our own client against real store processes: in place, over the connection, from store to store, across kills."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engines.errors import EngineError, RpcBusy, RpcNotFound
from engines.store.client import StoreClient
from engines.store.errors import LeaseLost, ObjectDamaged
from engines.wire_store import LeaseBody
from tests.engines.store.objects_made import MB, content, hash_of, manifest_of
from tests.engines.store.store_faults import TABLE
from tests.engines.store.store_process import StoreProcess

BLOCKS = [content(n, 1_500_000) for n in range(4)] + [content(9, 30_000)]
MANIFEST = manifest_of(BLOCKS, kinds=["block", "block", "block", "checkpoint", "tail"])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path("/dev/shm") / f"test-store-client-{os.getpid()}"
    path.mkdir()
    yield path
    path.rmdir()


@pytest.fixture(scope="module")
def here(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(folder, tmp_path_factory.mktemp("here")) as store:
        yield store


@pytest.fixture(scope="module")
def there(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    settings = {"directory": str(folder / "hydra-two"), "secret": "a secret between two hosts"}
    with StoreProcess(folder, tmp_path_factory.mktemp("there"), **settings) as store:
        yield store


@pytest.fixture
async def client(here: StoreProcess) -> AsyncIterator[StoreClient]:
    async with StoreClient("127.0.0.1", here.config.port) as connected:
        yield connected
        for name in await connected.list():
            await connected.delete(name)


@pytest.fixture
async def remote(there: StoreProcess) -> AsyncIterator[StoreClient]:
    async with StoreClient("127.0.0.1", there.config.port, secret=there.config.secret) as connected:
        yield connected
        for name in await connected.list():
            await connected.delete(name)


async def save(client: StoreClient, name: str) -> None:
    for chunk, data in zip(MANIFEST.chunks, BLOCKS, strict=True):
        async with client.writing(chunk.size, chunk.kind, f"key/{chunk.index}") as writing:
            if not writing.present:
                writing.view[:] = data
            assert await writing.commit() == chunk.hash
    assert (await client.put_manifest(name, MANIFEST)).written


async def test_a_snapshot_is_saved_and_read_in_place(client: StoreClient) -> None:
    await save(client, "kv/a")
    stored = (await client.store_info()).counts["stored_objects"]
    await save(client, "kv/a")
    assert (await client.store_info()).counts["stored_objects"] == stored
    async with client.held("kv/a") as held:
        for place, data in zip(held.places, BLOCKS, strict=True):
            assert client.slabs.prove(place, held.lease) == data
            copy = bytearray(place.size)
            client.slabs.read_into(place, held.lease, memoryview(copy))
            assert copy == data
            with pytest.raises(TypeError):
                client.slabs.read_only(place)[0] = 1
    async with client.held(logical_keys=["key/0", "key/none", "key/4"]) as held:
        assert [place.hash for place in held.places] == [hash_of(BLOCKS[0]), hash_of(BLOCKS[4])]
        assert held.missing == ("key/none",)
    with pytest.raises(RpcNotFound):
        async with client.held("kv/none"):
            pass


async def test_a_lease_goes_on_as_long_as_its_block_and_ends_with_it(client: StoreClient) -> None:
    await save(client, "kv/a")
    async with client.held("kv/a", lease_s=1.0) as held:
        first = held.lease.expires
        while time.clock_gettime(time.CLOCK_BOOTTIME) <= first:  # noqa: ASYNC110 -- the clock tells nobody
            await asyncio.sleep(0.02)
        assert held.lease.expires > first
        client.slabs.prove(held.places[0], held.lease)
    assert (await client.store_info()).status["leases"] == 0


async def test_who_reads_too_long_learns_that_it_means_nothing(client: StoreClient) -> None:
    await save(client, "kv/a")
    lease = await client.lease("kv/a", LeaseBody(lease_s=0.1))
    await asyncio.sleep(0.15)
    with pytest.raises(LeaseLost):
        client.slabs.prove(lease.places[0], lease)
    assert not await client.release(lease.ticket)


async def test_a_flipped_bit_is_never_served(client: StoreClient, here: StoreProcess) -> None:
    await save(client, "kv/a")
    async with client.held("kv/a") as held:
        place = held.places[1]
        client.slabs.range(place.path, place.offset, place.size)[12345] ^= 16
        with pytest.raises(ObjectDamaged):
            client.slabs.prove(place, held.lease)
    with pytest.raises(EngineError, match="damaged"):
        async with client.get("kv/a") as incoming:
            await incoming.read_into(memoryview(bytearray(incoming.total_bytes)))
    assert await client.get_manifest("kv/a") is None
    assert await client.sync_missing("", [chunk.hash for chunk in MANIFEST.chunks]) == (MANIFEST.chunks[1].hash,)
    await save(client, "kv/a")
    await asyncio.to_thread(here.restart)
    async with client.held("kv/a") as held:
        place = held.places[0]
        client.slabs.range(place.path, place.offset, place.size)[5] ^= 1
    await asyncio.to_thread(here.restart)
    with pytest.raises(EngineError, match="damaged"):
        await client.lease("kv/a", LeaseBody())


async def test_a_manifest_travels_between_stores_and_only_what_lacks(client: StoreClient, remote: StoreClient) -> None:
    await remote.push_chunks("kv/a", BLOCKS)
    assert (await remote.put_manifest("kv/a", MANIFEST)).written
    await client.push_chunks("kv/other", BLOCKS[:2])
    before = (await client.store_info()).counts["stored_objects"]
    assert (await client.pull(remote, "kv/a")).written
    assert (await client.store_info()).counts["stored_objects"] == before + 3
    got = [
        (index, bytes(body)) async for index, body in client.get_chunked("kv/a", MANIFEST, [MANIFEST.chunks[2].hash])
    ]
    assert got == [(n, BLOCKS[n]) for n in (0, 1, 3, 4)]
    async with client.get("kv/a") as incoming:
        whole = bytearray(incoming.total_bytes)
        await incoming.read_into(memoryview(whole))
    assert whole == b"".join(BLOCKS)
    assert (await client.pull(remote, "kv/a")).written
    with pytest.raises(RpcNotFound):
        await client.pull(remote, "kv/none")


async def test_a_full_store_says_so_and_keeps_what_is_read(client: StoreClient) -> None:
    await save(client, "kv/a")
    async with client.held("kv/a"):
        with pytest.raises(RpcBusy, match="no room"):
            for number in range(20, 40):
                async with client.writing(2_000_000, "block") as writing:
                    writing.view[:] = content(number, 2_000_000)
                    await writing.commit()
        assert await client.get_manifest("kv/a") == MANIFEST
    with pytest.raises(EngineError, match="at most"):
        await client.reserve(5 * MB, "block")


@pytest.mark.parametrize("rounds", [3, pytest.param(60, marks=pytest.mark.soak)])
async def test_a_killed_store_loses_nothing_that_was_answered(rounds: int, folder: Path, tmp_path: Path) -> None:
    """One client saves, another reads, both over the wire, while the process is killed at any moment and started again."""
    settings = {"directory": str(folder / "hydra-killed"), "capacity_bytes": 64 * MB}
    answered: dict[str, list[bytes]] = {}
    with StoreProcess(folder, tmp_path, **settings) as store:
        for turn in range(rounds):
            work = asyncio.gather(saving(store, answered, turn), reading(store, answered))
            async with asyncio.timeout(60):
                while not any(name.startswith(f"kv/{turn}/") for name in answered):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.1 + 0.05 * (turn % 5))
            await asyncio.to_thread(store.kill)
            await work
            await asyncio.to_thread(store.start)
            async with StoreClient("127.0.0.1", store.config.port) as client:
                for name, chunks in answered.items():
                    async with client.get(name) as incoming:
                        whole = bytearray(incoming.total_bytes)
                        await incoming.read_into(memoryview(whole))
                    wrong = whole != b"".join(chunks)
                    TABLE.add("process killed while it is written and read", reads_checked=1, wrong_bytes=wrong)
                    assert not wrong
                TABLE.add("process killed while it is written and read", trials=1, faults=1)
                for name in list(answered)[: len(answered) // 2]:
                    await client.delete(name)
                    del answered[name]
    assert answered


async def saving(store: StoreProcess, answered: dict[str, list[bytes]], turn: int) -> None:
    """Until the store is gone."""
    async with StoreClient("127.0.0.1", store.config.port) as client:
        for number in range(10_000):
            chunks = [content(turn * 100 + number % 5 + n, 150_000) for n in range(2)]
            name = f"kv/{turn}/{number % 8}"
            answered.pop(name, None)
            try:
                await client.push_chunks(name, chunks)
                if (await client.put_manifest(name, manifest_of(chunks))).written:
                    answered[name] = chunks
            except EngineError:
                # The last one may be there or not, as the new or as the old version: nobody was told.
                return


async def reading(store: StoreProcess, answered: dict[str, list[bytes]]) -> None:
    """Until the store is gone. What comes is what was answered, or belongs to a save that came meanwhile."""
    async with StoreClient("127.0.0.1", store.config.port) as client:
        try:
            while True:
                for name in await client.list():
                    before = answered.get(name)
                    async with client.get(name) as incoming:
                        whole = bytearray(incoming.total_bytes)
                        await incoming.read_into(memoryview(whole))
                    assert before is None or whole == b"".join(before) or answered.get(name) != before
        except EngineError:
            return

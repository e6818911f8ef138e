"""Objects and manifests for the store's tests: bytes that follow from a number, so that a test knows what it should read."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import blake3

from engines.store.books import check_books
from engines.store.config import StoreConfig
from engines.store.objects import StoredObject, boot_seconds, prove
from engines.store.store import Store
from engines.wire_store import Manifest, ManifestChunk

MB = 1 << 20


def config_in(folder: Path, **values: Any) -> StoreConfig:
    return StoreConfig(
        directory=str(folder / "hydra-one"), **{"capacity_bytes": 9 * MB, "slab_bytes": 2 * MB, **values}
    )


_OPEN: list[Store] = []


def new_store(folder: Path, clock: Callable[[], float] = boot_seconds, **values: Any) -> Store:
    config = config_in(folder, **values)
    config.folder.mkdir(parents=True, exist_ok=True)
    _OPEN.append(Store(config, clock=clock))
    return _OPEN[-1]


def reopen(store: Store) -> Store:
    """What the next process finds. The former one's views of the memory stay good, as a late reader's would."""
    _OPEN.append(Store(store.config, clock=store.clock))
    return _OPEN[-1]


def close_all() -> None:
    while _OPEN:
        _OPEN.pop().close()


@lru_cache(maxsize=96)
def content(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def hash_of(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()


def put(store: Store, data: bytes, logical_key: str = "", kind: str = "block") -> StoredObject:
    reservation = store.reserve(len(data), kind, logical_key)
    reservation.slot.view[:] = data
    return store.publish(reservation, prove(reservation.slot.view))[0]


def manifest_of(chunks: Sequence[bytes | StoredObject], **values: Any) -> Manifest:
    kinds = values.pop("kinds", ["block"] * len(chunks))
    made = [
        ManifestChunk(
            index=index,
            hash=hash_of(chunk) if isinstance(chunk, bytes) else chunk.digest.hex(),
            size=len(chunk) if isinstance(chunk, bytes) else chunk.size,
            kind=kinds[index],
        )
        for index, chunk in enumerate(chunks)
    ]
    total = sum(chunk.size for chunk in made)
    return Manifest(values.pop("n_past", len(made)), total, "model", "ab" * 32, "", tuple(made), **values)


def save(store: Store, name: str, chunks: Sequence[bytes], **values: Any) -> None:
    objects = [put(store, chunk) for chunk in chunks]
    store.put_manifest(name, manifest_of(objects, **values))


def check(store: Store) -> None:
    """Whether the books add up."""
    check_books(store.slabs, store.objects, store.manifests)
    assert store.slabs.size_bytes <= store.config.slab_room_bytes


def read(store: Store, name: str) -> list[bytes]:
    """The bytes of a manifest's objects, each judged as a reader would."""
    objects = store.get(name).objects
    for found in objects:
        store.judge(found, prove(found.slot.view))
    return [bytes(found.slot.view) for found in objects]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

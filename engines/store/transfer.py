"""Bytes between connections and slabs: in, straight from the socket to their place; out, by sendfile; proved on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from engines.rpc_exchange import Exchange
from engines.store.checksums import checksum_of
from engines.store.manifests import digest_from
from engines.store.objects import Proof, StoredObject, prove
from engines.store.store import Store

# What is summed up on the event loop; more goes to a thread, since it takes as long as the way there.
INLINE_BYTES = 1 << 17


async def proof_of(view: memoryview) -> Proof:
    return prove(view) if len(view) <= INLINE_BYTES else await asyncio.to_thread(prove, view)


class Transfer:
    """What the operations of a store's protocol share. `sent_bytes` left by sendfile."""

    def __init__(self, store: Store) -> None:
        self.sent_bytes = 0
        self._store = store

    async def receive(
        self, exchange: Exchange, size: int, kind: str, expected: str | None = None
    ) -> tuple[StoredObject, bool]:
        """The payload's next `size` bytes as an object, and whether it is new. What breaks leaves nothing behind."""
        reservation = self._store.reserve(size, kind, held=True)
        try:
            await exchange.read_into(reservation.slot.view)
            proof = await proof_of(reservation.slot.view)
            return self._store.publish(reservation, proof, digest_from(expected) if expected else None)
        finally:
            self._store.objects.abandon(reservation)

    async def verify(self, objects: Iterable[StoredObject]) -> None:
        """Compares each object with its sum: the digest the first time after a restart, then the checksum. The objects are
        held by the caller. Raises ObjectDamaged."""
        for found in dict.fromkeys(objects):
            await self._verify_one(found)

    async def _verify_one(self, found: StoredObject) -> None:
        view = found.slot.view
        if not found.verified:
            self._store.judge(found, await proof_of(view))
        elif len(view) <= INLINE_BYTES:
            self._store.judge(found, checksum_of(view))
        else:
            self._store.judge(found, await asyncio.to_thread(checksum_of, view))

    async def send(self, exchange: Exchange, found: StoredObject) -> None:
        slot = found.slot
        await exchange.send_file(slot.slab.file, slot.file_offset, slot.length)
        self.sent_bytes += slot.length

    async def send_all(self, exchange: Exchange, objects: Sequence[StoredObject]) -> None:
        for found in objects:
            await self.send(exchange, found)

"""What a store answers to engines of its own host, which write and read its slabs in place: RESERVE, COMMIT, LEASE, RELEASE."""

from __future__ import annotations

from collections.abc import Iterator

from engines.errors import InvalidRequest
from engines.rpc_exchange import Exchange
from engines.rpc_serving import Service
from engines.store.errors import ObjectNotFound
from engines.store.manifests import OBJECT_PREFIX, check_kind, check_logical_key, check_name, digest_from
from engines.store.objects import StoredObject
from engines.store.operations import LOOK_DEADLINE_S
from engines.store.store import Store
from engines.store.transfer import Transfer, proof_of
from engines.wire import MAX_CONFIGURE_BYTES, MAX_JSON_BYTES, Opcode, Status
from engines.wire_json import read_json
from engines.wire_store import (
    CommitAnswer,
    CommitBody,
    LeaseAnswer,
    LeaseBody,
    Place,
    ReleaseAnswer,
    ReserveAnswer,
    ReserveBody,
)


class PlaceOperations:
    """Bytes never pass through here: only where they lie."""

    def __init__(self, store: Store, transfer: Transfer) -> None:
        self._store = store
        self._transfer = transfer

    def services(self) -> dict[int, Service]:
        return {
            int(Opcode.RESERVE): Service(self.reserve, MAX_CONFIGURE_BYTES, LOOK_DEADLINE_S),
            int(Opcode.COMMIT): Service(self.commit, MAX_CONFIGURE_BYTES, None),
            int(Opcode.LEASE): Service(self.lease, MAX_JSON_BYTES, None),
            int(Opcode.RELEASE): Service(self.release, 0, LOOK_DEADLINE_S),
        }

    async def reserve(self, exchange: Exchange, body: bytes) -> None:
        asked = read_json(ReserveBody, body, "RESERVE")
        key = check_logical_key(exchange.head.key_text)
        check_kind(asked.kind)
        present = self._store.present(digest_from(asked.hash) if asked.hash else None, key)
        if present is not None:
            self._store.objects.index_key(present, key)
            await exchange.answer(Status.OK, ReserveAnswer(True, present.size, present.digest.hex()))
            return
        reservation = self._store.reserve(asked.size, asked.kind, key)
        slot = reservation.slot
        answer = ReserveAnswer(
            present=False,
            size=slot.length,
            ticket=reservation.ticket,
            path=str(slot.slab.path),
            offset=slot.file_offset,
            expires=reservation.made_at + self._store.config.preempt_s,
        )
        await exchange.answer(Status.OK, answer)

    async def commit(self, exchange: Exchange, body: bytes) -> None:
        asked = read_json(CommitBody, body, "COMMIT")
        expected = digest_from(asked.hash) if asked.hash else None
        reservation = self._store.objects.reservation(exchange.head.key_text)
        if reservation.held:
            raise InvalidRequest("Another COMMIT of this reservation is under way.")
        # From here on it is ours to give up: not even a client that leaves now keeps the room.
        reservation.held = True
        try:
            found, new = self._store.publish(reservation, await proof_of(reservation.slot.view), expected)
        finally:
            self._store.objects.abandon(reservation)
        await exchange.answer(Status.OK, CommitAnswer(new, found.digest.hex()))

    async def lease(self, exchange: Exchange, body: bytes) -> None:
        asked = read_json(LeaseBody, body, "LEASE")
        seconds = self._store.config.lease_s if asked.lease_s is None else asked.lease_s
        if not seconds > 0:
            raise InvalidRequest("lease_s must be above 0.", param="lease_s")
        if asked.ticket is not None:
            lease = self._store.objects.extend(asked.ticket, seconds)
            await exchange.answer(Status.OK, LeaseAnswer(lease.ticket, lease.until))
            return
        found = list(self._asked(exchange.head.key_text, asked))
        there = [(name, item) for name, item in found if item is not None]
        if not there:
            raise ObjectNotFound("None of the objects is stored.")
        # Leased before anything is awaited, so that what is answered is what was found.
        lease = self._store.objects.lease((item for _, item in there), seconds)
        await self._verify_recovered(lease.objects, lease.ticket)
        missing = tuple(name for name, item in found if item is None)
        answer = LeaseAnswer(lease.ticket, lease.until, tuple(_place(name, item) for name, item in there), missing)
        await exchange.answer(Status.PARTIAL if missing else Status.OK, answer)

    def _asked(self, key: str, asked: LeaseBody) -> Iterator[tuple[str, StoredObject | None]]:
        """Each object that was asked for, by the name it was asked by."""
        if key.startswith(OBJECT_PREFIX):
            text = key.removeprefix(OBJECT_PREFIX)
            yield text, self._store.present(digest_from(text))
        elif key:
            for item in self._store.get(check_name(key)).objects:
                yield item.digest.hex(), item
        for text in asked.hashes:
            yield text, self._store.present(digest_from(text))
        for logical_key in asked.logical_keys:
            yield logical_key, self._store.present(None, check_logical_key(logical_key))

    async def _verify_recovered(self, objects: tuple[StoredObject, ...], ticket: str) -> None:
        """The reader compares checksums; but after a restart these too are only what was found."""
        try:
            await self._transfer.verify(found for found in objects if not found.verified)
        except BaseException:
            self._store.objects.release(ticket)
            raise

    async def release(self, exchange: Exchange, _body: bytes) -> None:
        ticket = exchange.head.key_text
        reservation = self._store.objects.reservations.get(ticket)
        if reservation is not None and not reservation.held:
            self._store.objects.abandon(reservation)
            await exchange.answer(Status.OK, ReleaseAnswer(released=True))
            return
        await exchange.answer(Status.OK, ReleaseAnswer(self._store.objects.release(ticket)))


def _place(name: str, found: StoredObject) -> Place:
    text = found.digest.hex()
    return Place(
        hash=text,
        kind=found.name.kind,
        size=found.size,
        path=str(found.slot.slab.path),
        offset=found.slot.file_offset,
        checksum=found.name.checksum.hex(),
        logical_key=None if name == text else name,
    )

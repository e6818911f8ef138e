"""Objects in the slabs: written in two phases, found by digest or logical key, kept in place for their readers.

Synchronous and of one thread. Times are seconds since the machine's boot (`clock`), which go on through a restart of the
process and are the same in every process of the host: that is what lets a reader judge its own lease.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engines.store.checksums import checksum_of, digest_of
from engines.store.config import StoreConfig
from engines.store.errors import DigestMismatch, ObjectNotFound
from engines.store.records import Name, Record, State
from engines.store.slabs import Slabs, Slot

DIGEST_BYTES = 32
# Logical keys by which one object is found; one more only goes unindexed.
MAX_KEYS_PER_OBJECT = 64


def boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Proof:
    """What bytes are: BLAKE3, which names them, and the checksum that a reader of this host looks at, at memory's speed."""

    digest: bytes
    checksum: bytes


def prove(view: memoryview) -> Proof:
    """Both sums. Any thread; neither holds the interpreter's lock while it works."""
    return Proof(digest_of(view), checksum_of(view))


@dataclass(eq=False)
class StoredObject:
    """`refs` manifests name it. `holds` are readers in this process. `verified`: its digest was computed by this process."""

    slot: Slot
    name: Name
    used_at: float
    verified: bool
    inherited_until: float = 0.0
    refs: int = 0
    holds: int = 0
    keys: set[str] = field(default_factory=set)
    leases: set[Lease] = field(default_factory=set)
    gone: bool = False

    @property
    def digest(self) -> bytes:
        return self.name.digest

    @property
    def size(self) -> int:
        return self.slot.length

    @property
    def leased_until(self) -> float:
        return max((lease.until for lease in self.leases), default=self.inherited_until)

    def busy(self, now: float) -> bool:
        """Whether somebody may be reading its bytes in place."""
        return self.holds > 0 or max(self.leased_until, self.inherited_until) > now


@dataclass(eq=False)
class Lease:
    ticket: str
    until: float
    objects: tuple[StoredObject, ...]


@dataclass(eq=False)
class Reservation:
    """Room that is being written. `held`: by this process, which gives it up by itself; never pre-empted."""

    ticket: str
    slot: Slot
    kind: str
    logical_key: str
    made_at: float
    held: bool


class Objects:
    """All that lies in the slabs of one store. Room is somebody else's care: `reserve` returns None where there is none."""

    def __init__(self, config: StoreConfig, slabs: Slabs, clock: Callable[[], float] = boot_seconds) -> None:
        self._config = config
        self._slabs = slabs
        self.clock = clock
        self.by_digest: dict[bytes, StoredObject] = {}
        self._by_key: dict[str, StoredObject] = {}
        self.reservations: dict[str, Reservation] = {}
        self.leases: dict[str, Lease] = {}
        self._dying: dict[Slot, StoredObject | float] = {}

    # --- finding --------------------------------------------------------------------------------

    def find(self, digest: bytes) -> StoredObject | None:
        return self.by_digest.get(digest)

    def find_key(self, logical_key: str) -> StoredObject | None:
        return self._by_key.get(logical_key)

    @property
    def keys(self) -> int:
        return len(self._by_key)

    @property
    def dying(self) -> int:
        return len(self._dying)

    def dying_slots(self) -> list[Slot]:
        return list(self._dying)

    def index_key(self, found: StoredObject, logical_key: str) -> None:
        """The first object of a key keeps it: equal keys need not mean equal bytes, and neither is wrong."""
        if logical_key and logical_key not in self._by_key and len(found.keys) < MAX_KEYS_PER_OBJECT:
            self._by_key[logical_key] = found
            found.keys.add(logical_key)

    def touch(self, found: StoredObject) -> None:
        found.used_at = self.clock()
        self._mark(found)

    # --- writing --------------------------------------------------------------------------------

    def reserve(self, length: int, kind: str, logical_key: str, *, held: bool) -> Reservation | None:
        now = self.clock()
        slot = self._slabs.take(length, now + self._config.preempt_s, now)
        if slot is None:
            return None
        reservation = Reservation(secrets.token_hex(8), slot, kind, logical_key, now, held)
        self.reservations[reservation.ticket] = reservation
        return reservation

    def reservation(self, ticket: str) -> Reservation:
        """Raises ObjectNotFound for a ticket that was never given, or whose room was pre-empted."""
        found = self.reservations.get(ticket)
        if found is None:
            raise ObjectNotFound("No reservation has that ticket: it was committed, given up or took too long.")
        return found

    def publish(self, reservation: Reservation, proof: Proof, expected: bytes | None) -> tuple[StoredObject, bool]:
        """Ends a reservation: its bytes are an object now, or, where there was one of the digest or logical key, that counts.

        Returns which, and whether it is the new one. Raises DigestMismatch, and the room is free again.
        """
        self.reservation(reservation.ticket)
        if expected is not None and expected != proof.digest:
            self.abandon(reservation)
            raise DigestMismatch(f"The bytes have the digest {proof.digest.hex()}, not {expected.hex()}.")
        former = self.find(proof.digest) or self._by_key.get(reservation.logical_key)
        if former is not None:
            self.abandon(reservation)
            self.index_key(former, reservation.logical_key)
            self.touch(former)
            return former, False
        now = self.clock()
        del self.reservations[reservation.ticket]
        slot = reservation.slot
        name = Name(reservation.kind, proof.digest, proof.checksum, reservation.logical_key, time.time())
        slot.slab.publish(slot, name, now)
        made = StoredObject(slot, name, now, verified=True)
        self.by_digest[proof.digest] = made
        self.index_key(made, reservation.logical_key)
        return made, True

    def abandon(self, reservation: Reservation) -> None:
        """Gives the room back. Calling it for one that has ended is harmless."""
        if self.reservations.pop(reservation.ticket, None) is not None:
            reservation.slot.slab.release(reservation.slot)

    # --- reading --------------------------------------------------------------------------------

    def lease(self, objects: Iterable[StoredObject], seconds: float) -> Lease:
        now = self.clock()
        lease = Lease(secrets.token_hex(8), now + min(seconds, self._config.max_lease_s), tuple(dict.fromkeys(objects)))
        self.leases[lease.ticket] = lease
        for found in lease.objects:
            found.leases.add(lease)
            found.used_at = now
            self._mark(found)
        return lease

    def extend(self, ticket: str, seconds: float) -> Lease:
        """Never shortens. Raises ObjectNotFound for a lease that has ended: what was read under it may be others' bytes."""
        lease = self._living(ticket)
        if lease is None:
            raise ObjectNotFound("No lease has that ticket any more; what was read since it ended must be thrown away.")
        lease.until = max(lease.until, self.clock() + min(seconds, self._config.max_lease_s))
        for found in lease.objects:
            self._mark(found)
        return lease

    def release(self, ticket: str) -> bool:
        """Whether the lease held until now."""
        lease = self._living(ticket)
        if lease is None:
            return False
        self._end(lease)
        return True

    def _living(self, ticket: str) -> Lease | None:
        lease = self.leases.get(ticket)
        if lease is not None and lease.until <= self.clock():
            self._end(lease)
            return None
        return lease

    def _end(self, lease: Lease) -> None:
        self.leases.pop(lease.ticket, None)
        for found in lease.objects:
            found.leases.discard(lease)
            self._mark(found)
            self._settle(found)

    def hold(self, objects: Iterable[StoredObject]) -> tuple[StoredObject, ...]:
        """Keeps objects in place for a reader inside this process, until `drop`."""
        held = tuple(objects)
        for found in held:
            found.holds += 1
        return held

    def drop(self, held: Iterable[StoredObject]) -> None:
        for found in held:
            found.holds -= 1
            self._settle(found)

    # --- ends -----------------------------------------------------------------------------------

    def remove(self, found: StoredObject) -> None:
        """No longer an object. Its bytes stay as long as somebody may read them."""
        if found.gone:
            return
        found.gone = True
        del self.by_digest[found.digest]
        for key in found.keys:
            del self._by_key[key]
        self.let_die(found)

    def let_die(self, found: StoredObject) -> None:
        if found.busy(self.clock()):
            found.slot.slab.let_die(found.slot)
            self._dying[found.slot] = found
        else:
            found.slot.slab.release(found.slot)

    def sweep(self) -> None:
        """Ends what has run out: every lease, every reservation past its time, every dead object without readers."""
        now = self.clock()
        for lease in [lease for lease in self.leases.values() if lease.until <= now]:
            self._end(lease)
        for reservation in list(self.reservations.values()):
            if not reservation.held and reservation.made_at + self._config.reclaim_s <= now:
                self.abandon(reservation)
        for slot, holder in list(self._dying.items()):
            if isinstance(holder, float):
                if holder <= now:
                    del self._dying[slot]
                    slot.slab.release(slot)
            else:
                self._settle(holder)

    def preempt(self) -> bool:
        """Gives up the oldest reservation that has taken too long. False where there is none."""
        late = self.clock() - self._config.preempt_s
        overdue = [r for r in self.reservations.values() if not r.held and r.made_at <= late]
        if not overdue:
            return False
        self.abandon(min(overdue, key=lambda reservation: reservation.made_at))
        return True

    def _settle(self, found: StoredObject) -> None:
        if found.slot in self._dying and not found.busy(self.clock()):
            del self._dying[found.slot]
            found.slot.slab.release(found.slot)

    def _mark(self, found: StoredObject) -> None:
        if not found.gone:
            found.slot.slab.mark(found.slot, max(found.leased_until, found.inherited_until), found.used_at)

    # --- after a restart ------------------------------------------------------------------------

    def recover(self, slot: Slot, record: Record, *, same_boot: bool) -> StoredObject | None:
        """Takes a found record in: an object that must still be verified, or room that a reader or writer of the former process
        may still use. None for the latter."""
        until = record.leased_until if same_boot else 0.0
        name = record.name
        if record.state != State.PUBLISHED or name is None or name.digest in self.by_digest:
            if until > self.clock():
                slot.slab.let_die(slot)
                self._dying[slot] = until
            else:
                slot.slab.release(slot)
            return None
        used_at = record.used_at if same_boot else 0.0
        return StoredObject(slot, name, used_at, verified=False, inherited_until=until)

    def adopt(self, found: StoredObject) -> None:
        self.by_digest[found.digest] = found
        self.index_key(found, found.name.logical_key)

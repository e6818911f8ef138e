"""The store itself: objects, manifests, and how room is made. Synchronous, of one thread, knows no network.

Room comes from slabs that exist, then from new ones, then from what may go: dead reservations, objects that no manifest names,
and the least recently used manifests that are neither pinned nor being read. What none of these gives is refused, loudly.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from engines.errors import InvalidRequest
from engines.store.books import Counts, StoreStatus, check_books, status_of
from engines.store.config import StoreConfig
from engines.store.errors import ManifestInvalid, ObjectDamaged, ObjectNotFound, ObjectTooLarge, StoreFull
from engines.store.manifests import (
    Manifests,
    StoredManifest,
    check_manifest,
    digest_from,
    read_envelope,
    write_envelope,
)
from engines.store.objects import Objects, Proof, Reservation, StoredObject, boot_seconds, prove
from engines.store.records import MANIFEST_KIND, Name, Record, State
from engines.store.slabs import Growth, Slabs, Slot, TmpfsFull
from engines.wire_store import Manifest

log = logging.getLogger("hydra.store")

# After tmpfs refused a slab, how long the store makes do with what it has before it asks again.
GROWTH_PAUSE_S = 5.0
# Refusals are counted one by one, and told to the log this often.
LOUD_PAUSE_S = 5.0


class Store:
    """One store over `folder`'s slabs, with what a former process left there."""

    def __init__(
        self, config: StoreConfig, *, same_boot: bool = True, clock: Callable[[], float] = boot_seconds
    ) -> None:
        self.config = config
        self.counts = Counts()
        self.clock = clock
        self.slabs = Slabs(config.folder, config.slab_room_bytes, config.slab_bytes)
        self.objects = Objects(config, self.slabs, clock)
        self.manifests = Manifests()
        # Told of every manifest that was written, and of every one that was dropped for good (not of one that gave way).
        self.on_saved: Callable[[str], None] = lambda name: None
        self.on_deleted: Callable[[str], None] = lambda name: None
        self._grow_after = 0.0
        self._loud_after = 0.0
        self._recover(same_boot)
        check_books(self.slabs, self.objects, self.manifests)

    def status(self) -> StoreStatus:
        return status_of(self.config.capacity_bytes, self.slabs, self.objects, self.manifests)

    def close(self) -> None:
        self.slabs.close()

    # --- writing objects ------------------------------------------------------------------------

    def reserve(self, size: int, kind: str, logical_key: str = "", *, held: bool = False) -> Reservation:
        """Room for an object of `size` bytes, to be written through `reservation.slot.view`.

        Raises ObjectTooLarge, StoreFull.
        """
        if size <= 0:
            raise InvalidRequest("An object has at least one byte.", param="size")
        if size > self.slabs.largest_bytes:
            raise ObjectTooLarge(f"An object has at most {self.slabs.largest_bytes} bytes here, not {size}.")
        while True:
            reservation = self.objects.reserve(size, kind, logical_key, held=held)
            if reservation is not None:
                return reservation
            if not self._make_room(size):
                self._refuse(size)
                raise StoreFull(f"The store has no room for {size} bytes, and nothing that may go.")

    def _refuse(self, size: int) -> None:
        self.counts.refused_full += 1
        if self.clock() >= self._loud_after:
            self._loud_after = self.clock() + LOUD_PAUSE_S
            log.error("no room for %d bytes (refusal %d): %s", size, self.counts.refused_full, self.status())

    def publish(
        self, reservation: Reservation, proof: Proof, expected: bytes | None = None
    ) -> tuple[StoredObject, bool]:
        """Makes an object of what was written. Raises DigestMismatch, ObjectNotFound."""
        found, new = self.objects.publish(reservation, proof, expected)
        if new:
            self.counts.stored_objects += 1
        else:
            self.counts.deduplicated_objects += 1
        return found, new

    def present(self, digest: bytes | None, logical_key: str = "") -> StoredObject | None:
        """The object that need not be written again; it counts as used now."""
        found = (self.objects.find(digest) if digest else None) or (
            self.objects.find_key(logical_key) if logical_key else None
        )
        if found is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self.objects.touch(found)
        return found

    # --- room -----------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Frees or takes some room. False when nothing is left to do."""
        if self._grow(size):
            return True
        free_before = self.slabs.free_bytes
        self.objects.sweep()
        if self.slabs.free_bytes > free_before:
            return True
        if self.objects.preempt():
            self.counts.reservations_preempted += 1
            return True
        return self._collect(self._orphans(self.config.preempt_s)[:1]) or self._evict()

    def _grow(self, size: int) -> bool:
        if self.clock() < self._grow_after:
            return False
        try:
            return self.slabs.grow(size)
        except TmpfsFull as error:
            self.note_full(error)
            return False

    def growth(self) -> Growth | None:
        """A slab that should be made now, so that nobody has to wait for it: less than half of one is free."""
        if self.clock() < self._grow_after or self.slabs.free_bytes >= self.config.slab_bytes // 2:
            return None
        return self.slabs.growth()

    def note_full(self, error: TmpfsFull) -> None:
        """Tmpfs refused a slab: no other one is asked for in the next seconds."""
        self.counts.tmpfs_full += 1
        self._grow_after = self.clock() + GROWTH_PAUSE_S
        log.warning("%s; making do with %d bytes", error, self.slabs.size_bytes)

    def _orphans(self, age_s: float) -> list[StoredObject]:
        """Objects that no manifest names, and nobody has used or asked for in that time; the longest unused first."""
        now = self.clock()
        found = [
            item
            for item in self.objects.by_digest.values()
            if not item.refs and item.used_at <= now - age_s and not item.busy(now)
        ]
        return sorted(found, key=lambda item: item.used_at)

    def _collect(self, orphans: list[StoredObject]) -> bool:
        for found in orphans:
            self.objects.remove(found)
        self.counts.orphans_collected += len(orphans)
        return bool(orphans)

    def _evict(self) -> bool:
        """Drops the least recently used manifest that may go. One whose own objects are being read gives no room, so it stays;
        a reader of what it shares with others has no say."""
        now = self.clock()
        for stored in self.manifests:
            if self.is_pinned(stored) or any(found.refs == 1 and found.busy(now) for found in stored.objects):
                continue
            self._drop(stored)
            self.counts.evicted_manifests += 1
            log.info("evicted %s", stored.name)
            return True
        return False

    def sweep(self) -> None:
        """Ends what has run out. Called now and then, and whenever room is short."""
        self.objects.sweep()
        self._collect(self._orphans(self.config.orphan_s))

    # --- manifests ------------------------------------------------------------------------------

    def missing(self, manifest: Manifest) -> list[str]:
        """Hashes of the manifest's chunks that are not stored."""
        hashes = dict.fromkeys(chunk.hash for chunk in manifest.chunks)
        return [text for text in hashes if self.objects.find(digest_from(text)) is None]

    def put_manifest(self, name: str, manifest: Manifest) -> StoredManifest:
        """Writes the new one, then lets it take the place of the old one. An unchanged one writes nothing.

        Raises ManifestInvalid, ObjectNotFound (chunks are missing), StoreFull.
        """
        check_manifest(manifest)
        objects = tuple(self._chunk(chunk.hash, chunk.size) for chunk in manifest.chunks)
        former = self.manifests.get(name)
        if former is not None and former.manifest == manifest:
            self.use(former)
            return former
        held = self.objects.hold(objects)
        try:
            self._check_bounds(former, manifest, objects)
            record = self._write_manifest(write_envelope(name, manifest))
            stored = StoredManifest(name, manifest, objects, record)
            self._take_in(stored)
        finally:
            self.objects.drop(held)
        self._retire(stored)
        self.on_saved(name)
        return stored

    def _chunk(self, text: str, size: int) -> StoredObject:
        found = self.objects.find(digest_from(text))
        if found is None:
            raise ObjectNotFound(f"The chunk {text} is not stored.")
        if found.size != size:
            raise ManifestInvalid(f"The chunk {text} has {found.size} bytes, not {size}.")
        return found

    def _check_bounds(
        self, former: StoredManifest | None, manifest: Manifest, objects: tuple[StoredObject, ...]
    ) -> None:
        if manifest.pinned:
            pinned = {
                found
                for stored in self.manifests
                if self.is_pinned(stored) and stored is not former
                for found in stored.objects
            }
            total = sum(found.size for found in pinned.union(objects))
            bound = int(self.config.pinned_share * self.config.capacity_bytes)
            if total > bound:
                raise StoreFull(f"Pinned manifests would name {total} bytes; at most {bound} may be pinned.")
        if former is None and len(self.manifests) >= self.config.max_manifests and not self._evict():
            raise StoreFull(f"{len(self.manifests)} manifests are stored, and none of them may go.")

    def _write_manifest(self, raw: bytes) -> StoredObject:
        reservation = self.reserve(len(raw), MANIFEST_KIND, held=True)
        slot = reservation.slot
        slot.view[:] = raw
        proof = prove(slot.view)
        name = Name(MANIFEST_KIND, proof.digest, proof.checksum, "", time.time())
        del self.objects.reservations[reservation.ticket]
        slot.slab.publish(slot, name, self.clock())
        return StoredObject(slot, name, self.clock(), verified=True)

    def _take_in(self, stored: StoredManifest) -> None:
        for chunk, found in zip(stored.manifest.chunks, stored.objects, strict=True):
            self.objects.index_key(found, chunk.logical_key or "")
        former = self.manifests.add(stored)
        if former is not None:
            self._forget(former)

    def _retire(self, latest: StoredManifest) -> None:
        """Keeps a session's manifests, and those of them with a checkpoint, within their bounds: the oldest go."""
        siblings = [stored for stored in self.manifests.of_session(latest.session) if not self.is_pinned(stored)]
        surplus = siblings[: -self.config.session_manifests]
        with_checkpoint = [stored for stored in siblings if stored.has_checkpoint]
        surplus += [s for s in with_checkpoint[: -self.config.session_checkpoints] if s not in surplus]
        for stored in surplus:
            if stored is not latest:
                self._drop(stored)
                self.on_deleted(stored.name)
                self.counts.retired_manifests += 1

    def delete(self, name: str) -> bool:
        """Drops a manifest and what only it named. False where there is none; a copy on disk goes all the same."""
        stored = self.manifests.get(name)
        if stored is not None:
            self._drop(stored)
        self.on_deleted(name)
        return stored is not None

    def get(self, name: str) -> StoredManifest:
        """Raises ObjectNotFound."""
        stored = self.manifests.get(name)
        if stored is None:
            self.counts.misses += 1
            raise ObjectNotFound(f"Nothing is stored as {name!r}.")
        self.counts.hits += 1
        self.use(stored)
        return stored

    def use(self, stored: StoredManifest) -> None:
        self.manifests.use(stored)
        self.objects.touch(stored.record)
        for found in stored.objects:
            self.objects.touch(found)

    def is_pinned(self, stored: StoredManifest) -> bool:
        """Whether it may not go. A pin ends by itself, or those of engines that are gone would fill the memory for good."""
        return stored.manifest.pinned and self.clock() < stored.record.used_at + self.config.pin_s

    def set_n_past(self, name: str, n_past: int) -> StoredManifest:
        return self.put_manifest(name, replace(self.get(name).manifest, n_past=n_past))

    def _drop(self, stored: StoredManifest) -> None:
        self.manifests.remove(stored.name)
        self._forget(stored)

    def _forget(self, stored: StoredManifest) -> None:
        """The manifest's own bytes first: it must never be found again without its objects. What somebody in this process
        still works with stays, as an orphan."""
        stored.record.gone = True
        self.objects.let_die(stored.record)
        for found in stored.distinct:
            if not found.refs and not found.holds:
                self.objects.remove(found)

    # --- proof ----------------------------------------------------------------------------------

    def judge(self, found: StoredObject, proof: Proof | bytes) -> None:
        """Compares an object with its bytes' proof, or with their checksum alone; one that differs is dropped, with every
        manifest that names it. Raises ObjectDamaged."""
        sound = proof == found.name.checksum if isinstance(proof, bytes) else proof.digest == found.digest
        if sound:
            found.verified = found.verified or not isinstance(proof, bytes)
            return
        self.counts.damaged_objects += 1
        log.error("object %s is damaged in memory; dropping it and what names it", found.digest.hex())
        for stored in self.manifests.of([found]):
            self._drop(stored)
        self.objects.remove(found)
        raise ObjectDamaged(f"The object {found.digest.hex()} was damaged in memory.")

    # --- after a restart ------------------------------------------------------------------------

    def _recover(self, same_boot: bool) -> None:
        manifests: list[StoredObject] = []
        for slot, record in sorted(self.slabs.recover(), key=lambda pair: pair[0].generation):
            found = self._recover_record(slot, record, same_boot)
            if found is not None and found.name.kind == MANIFEST_KIND:
                manifests.append(found)
        for text in self.slabs.unsound:
            log.error("a slab is lost: %s", text)
        for record_object in manifests:
            self._recover_manifest(record_object)
        by_use = sorted(self.manifests, key=lambda stored: stored.record.used_at)
        for stored in by_use:
            self.manifests.use(stored)
        self.counts.recovered_objects = len(self.objects.by_digest)
        self.counts.recovered_manifests = len(self.manifests)

    def _recover_record(self, slot: Slot, record: Record, same_boot: bool) -> StoredObject | None:
        found = self.objects.recover(slot, record, same_boot=same_boot)
        if found is None:
            if record.state == State.PUBLISHED:
                self.counts.dropped_at_recovery += 1
            return None
        if record.name is not None and record.name.kind != MANIFEST_KIND:
            self.objects.adopt(found)
        return found

    def _recover_manifest(self, record: StoredObject) -> None:
        """Manifests come in the order of their generations, so the later one of a name counts."""
        try:
            self.judge_manifest(record)
            envelope = read_envelope(bytes(record.slot.view))
            objects = tuple(self._chunk(chunk.hash, chunk.size) for chunk in envelope.manifest.chunks)
        except (InvalidRequest, ManifestInvalid, ObjectNotFound, ObjectDamaged) as error:
            log.error("a manifest is lost: %s", error)
            self.counts.dropped_at_recovery += 1
            record.gone = True
            self.objects.let_die(record)
            return
        self._take_in(StoredManifest(envelope.name, envelope.manifest, objects, record))

    def judge_manifest(self, record: StoredObject) -> None:
        if prove(record.slot.view).digest != record.digest:
            self.counts.damaged_objects += 1
            raise ObjectDamaged("A manifest was damaged in memory.")
        record.verified = True

"""Carries manifests to the disk copy some seconds after they were saved, and back after a reboot."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass

from engines.errors import EngineError
from engines.store.disk import DiskCopy, KeptManifest
from engines.store.errors import ObjectNotFound
from engines.store.manifests import StoredManifest, digest_from, write_envelope
from engines.store.objects import StoredObject
from engines.store.store import Store
from engines.store.transfer import proof_of
from engines.wire_store import ManifestChunk

log = logging.getLogger("hydra.store.disk")

# Saves that wait; another save of one that waits already takes no place. Deletions always wait: they must not be forgotten.
MAX_WAITING = 4096
# How much of memory may be filled from disk: the rest is for those who come now.
READ_BACK_SHARE = 0.75


@dataclass
class _Due:
    at: float
    deleted: bool


class WriteBehind:
    """One writer, in the order of the saves. What fails is counted and left: memory is the truth."""

    def __init__(self, store: Store, disk: DiskCopy) -> None:
        self._store = store
        self._disk = disk
        self._waiting: OrderedDict[str, _Due] = OrderedDict()
        self._stirred = asyncio.Event()

    def saved(self, name: str) -> None:
        self._note(name, deleted=False)

    def deleted(self, name: str) -> None:
        self._note(name, deleted=True)

    def _note(self, name: str, *, deleted: bool) -> None:
        due = self._waiting.get(name)
        if due is not None:
            due.deleted = deleted
            return
        if not deleted and len(self._waiting) >= MAX_WAITING:
            self._store.counts.disk_skipped += 1
            return
        self._waiting[name] = _Due(asyncio.get_running_loop().time() + self._store.config.disk_delay_s, deleted)
        self._stirred.set()

    async def run(self) -> None:
        """Until cancelled: what a former boot left comes first."""
        await self.read_back()
        while True:
            while not self._waiting:
                self._stirred.clear()
                await self._stirred.wait()
            first = next(iter(self._waiting.values()))
            await asyncio.sleep(max(0.0, first.at - asyncio.get_running_loop().time()))
            carrying = asyncio.create_task(self._carry(*self._waiting.popitem(last=False)))
            try:
                await asyncio.shield(carrying)
            except asyncio.CancelledError:
                await carrying  # a stop must not lose the one that is under way, nor let it run beside the others
                raise

    async def flush(self) -> None:
        """Everything that waits, at once; for a stop."""
        while self._waiting:
            await self._carry(*self._waiting.popitem(last=False))

    # --- to disk --------------------------------------------------------------------------------

    async def _carry(self, name: str, due: _Due) -> None:
        stored = self._store.manifests.get(name)
        try:
            if stored is not None:
                await self._write(stored)
                self._store.counts.disk_written += 1
            elif due.deleted:
                await asyncio.to_thread(self._disk.remove, name)
            else:
                self._store.counts.disk_skipped += 1  # evicted before its turn came
        except OSError as error:
            self._store.counts.disk_errors += 1
            log.error("%s could not be copied to disk: %s", name, error)

    async def _write(self, stored: StoredManifest) -> None:
        held = self._store.objects.hold(stored.distinct)
        try:
            for found in held:
                await asyncio.to_thread(self._write_object, found)
            raw = write_envelope(stored.name, stored.manifest)
            await asyncio.to_thread(self._disk.write_manifest, stored.name, raw)
        finally:
            self._store.objects.drop(held)

    def _write_object(self, found: StoredObject) -> None:
        text = found.digest.hex()
        if not self._disk.has_object(text, found.size):
            self._disk.write_object(text, found.slot.view)

    # --- from disk ------------------------------------------------------------------------------

    async def read_back(self) -> None:
        """The newest manifests that memory does not have, as many as fit a share of it, each object proved."""
        chosen: list[KeptManifest] = []
        room = int(self._store.config.capacity_bytes * READ_BACK_SHARE)
        for kept in await asyncio.to_thread(lambda: list(self._disk.newest())):
            room -= kept.envelope.manifest.total_size
            if room < 0:
                break
            chosen.append(kept)
        # The oldest first, so that the newest are the last to go again.
        for kept in reversed(chosen):
            name = kept.envelope.name
            try:
                self._store.counts.disk_recovered += await self._read_one(kept)
            except (OSError, EngineError) as error:
                self._store.counts.disk_errors += 1
                log.error("%s is not read back from disk: %s", name, error)

    async def _read_one(self, kept: KeptManifest) -> bool:
        held: list[StoredObject] = []
        try:
            for chunk in kept.envelope.manifest.chunks:
                found = self._store.objects.find(digest_from(chunk.hash)) or await self._read_object(chunk)
                held += self._store.objects.hold([found])
            if self._store.manifests.get(kept.envelope.name) is not None or self._is_deleted(kept.envelope.name):
                return False
            self._store.put_manifest(kept.envelope.name, kept.envelope.manifest)
            return True
        finally:
            self._store.objects.drop(held)

    def _is_deleted(self, name: str) -> bool:
        """Whether it was deleted since its turn to be read back was planned; its file is still there then."""
        due = self._waiting.get(name)
        return due is not None and due.deleted

    async def _read_object(self, chunk: ManifestChunk) -> StoredObject:
        """Raises ObjectNotFound, DigestMismatch."""
        reservation = self._store.reserve(chunk.size, chunk.kind, held=True)
        try:
            view = reservation.slot.view
            if not await asyncio.to_thread(self._disk.read_object, chunk.hash, view):
                raise ObjectNotFound(f"The object {chunk.hash} is not on disk as it was.")
            return self._store.publish(reservation, await proof_of(view), digest_from(chunk.hash))[0]
        finally:
            self._store.objects.abandon(reservation)

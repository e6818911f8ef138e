"""A store's slabs as a process of the same host sees them: mapped once, read and written where they lie. Synchronous.

Who reads checks the clock after reading, not only before: a lease that ran out meanwhile may mean other bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import numpy as np

from engines.store.checksums import checksum_of
from engines.store.errors import LeaseLost, ObjectDamaged, ObjectNotFound
from engines.store.objects import boot_seconds
from engines.wire_store import LeaseAnswer, Place, ReserveAnswer


class SlabMap:
    """The slabs that this process has mapped so far."""

    def __init__(self) -> None:
        self._maps: dict[str, memoryview] = {}

    def range(self, path: str, offset: int, size: int) -> memoryview:
        """`size` bytes of a slab, writable. Raises ObjectNotFound for a file or range that is not there (any more)."""
        whole = self._maps.get(path)
        if whole is None:
            whole = self._maps[path] = self._map(path)
        if not 0 <= offset <= offset + size <= len(whole):
            raise ObjectNotFound(f"{path} has {len(whole)} bytes; {size} at {offset} are none of them.")
        return whole[offset : offset + size]

    def _map(self, path: str) -> memoryview:
        self._forget_gone()
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ObjectNotFound(f"{path} cannot be mapped: {error.strerror}.") from error
        try:
            size = os.fstat(fd).st_size
            view = memoryview(mmap.mmap(fd, size, flags=mmap.MAP_SHARED))
        finally:
            os.close(fd)
        # Page tables are made beside: a slab's take a reader's first 25 ms, and are of use to the second only.
        threading.Thread(target=_touch, args=(view,), name="slab-map", daemon=True).start()
        return view

    def _forget_gone(self) -> None:
        """A store that was stopped has removed its slabs; what is mapped of them would keep their memory."""
        for path in [path for path in self._maps if not Path(path).exists()]:
            del self._maps[path]

    # --- reading --------------------------------------------------------------------------------

    def read_only(self, place: Place) -> memoryview:
        """An object's bytes in place; good as long as `confirm` says so afterwards."""
        return self.range(place.path, place.offset, place.size).toreadonly()

    def read_into(self, place: Place, lease: LeaseAnswer, target: memoryview) -> None:
        """Copies an object out and proves the copy. Raises ObjectDamaged, LeaseLost; `target` then means nothing."""
        target[:] = self.read_only(place)
        _judge(place, lease, checksum_of(target).hex())

    def prove(self, place: Place, lease: LeaseAnswer) -> memoryview:
        """An object's bytes in place, proved now. Raises ObjectDamaged, LeaseLost."""
        view = self.read_only(place)
        _judge(place, lease, checksum_of(view).hex())
        return view

    # --- writing --------------------------------------------------------------------------------

    def writable(self, answer: ReserveAnswer) -> memoryview:
        """The room of a reservation. Raises LeaseLost where it may already be another's."""
        if answer.path is None or answer.offset is None or answer.expires is None:
            raise ObjectNotFound("There is nothing to write: the object is stored already.")
        if boot_seconds() >= answer.expires:
            raise LeaseLost("The reservation has run out before it was written.")
        return self.range(answer.path, answer.offset, answer.size)


def _touch(view: memoryview) -> None:
    """Reads a byte of each page, without the interpreter's lock."""
    np.frombuffer(view, dtype=np.uint8)[:: mmap.PAGESIZE].max(initial=0)


def _judge(place: Place, lease: LeaseAnswer, checksum: str) -> None:
    confirm(lease)
    if checksum != place.checksum:
        raise ObjectDamaged(f"The object {place.hash} does not have its checksum.")


def confirm(lease: LeaseAnswer) -> None:
    """Raises LeaseLost unless what was read so far was certainly still the leased bytes."""
    if boot_seconds() >= lease.expires:
        raise LeaseLost("The lease ran out while its objects were read.")

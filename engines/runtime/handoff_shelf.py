"""Memory of one host through which pieces pass between two of its engines: the source's arena, mapped by the target.

A name comes over the wire, never a path: the target opens it below the one folder that arenas lie in, without following links,
and maps it only when file, owner and size are the announced ones and the nonce stands where it was said to. That proves that
both see the same memory; on another host, or as another user, the offer is declined and bytes travel instead.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engines.errors import StateInvalid
from engines.runtime.arena import FOLDER, PIN_TRIES, PREFIX, Arena, Buffer, PartlyPinned, Pin, pin
from engines.runtime.state_layout import Bytes
from engines.wire_handoff import ShelfOffer

log = logging.getLogger("hydra.engine.handoff")

NONCE_BYTES = 32
MOST_SHELVES = 8
GONE_LOOK_S = 10.0
MAX_SHELF_BYTES = 1 << 40
_NAME = re.compile(re.escape(PREFIX) + r"[0-9]{1,10}-[0-9a-f]{8}")


class Offering:
    """The source's side, while ADOPT is answered; `offer` None where there is nothing to share."""

    def __init__(self, arena: Arena) -> None:
        self._buffer: Buffer | None = None
        self.offer: ShelfOffer | None = None
        if arena.path is None:
            return
        self._buffer = arena.take_now(NONCE_BYTES)
        if self._buffer is None:
            return
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._buffer.data[:] = np.frombuffer(nonce, dtype=np.uint8)
        try:
            found = arena.path.stat()
        except OSError as error:
            log.warning("the arena's file is not in its place any more, so bytes are sent: %s", error)
            return
        self.offer = ShelfOffer(
            arena.path.name, arena.size_bytes, found.st_dev, found.st_ino, self._buffer.offset, nonce.hex()
        )

    def __enter__(self) -> ShelfOffer | None:
        return self.offer

    def __exit__(self, *_: object) -> None:
        if self._buffer is not None:
            self._buffer.free()


@dataclass(frozen=True, eq=False)
class Shelf:
    """Another engine's arena as this one sees it. Where it is page-locked it is let go with its last reader."""

    memory: Bytes
    pinned: Pin | None

    def __post_init__(self) -> None:
        if self.pinned is not None:
            # The last reader may be any thread, also one that must not wait for a card. A process that ends needs none of it.
            weakref.finalize(self, _let_go, self.pinned, self.memory).atexit = False

    def piece(self, offset: int, size_bytes: int) -> Bytes:
        """Raises StateInvalid for a place that is not on it."""
        if not 0 <= offset <= offset + size_bytes <= self.memory.nbytes:
            raise StateInvalid(f"The shelf has {self.memory.nbytes} bytes; {size_bytes} at {offset} are none of them.")
        return self.memory[offset : offset + size_bytes]

    def left(self) -> None:
        """A reader is through with a piece; who holds this until then keeps the shelf."""


def _let_go(pinned: Pin, memory: Bytes) -> None:
    threading.Thread(target=_released, args=(pinned, memory), name="shelf-unpin", daemon=True).start()


def _released(pinned: Pin, _memory: Bytes) -> None:
    """The memory stays mapped until here."""
    pinned.release()


class Shelves:
    """The arenas that this engine has mapped, the last used last. `take` is for a thread, one at a time."""

    def __init__(self, folder: Path = FOLDER, cuda_device: int | None = None) -> None:
        self._folder, self._cuda_device = folder, cuda_device
        self._known: OrderedDict[tuple[str, int, int], Shelf] = OrderedDict()

    def take(self, offer: ShelfOffer) -> Shelf | None:
        """The offered memory; None where this process does not see the same, or may not."""
        try:
            shelf = self._taken(offer)
        except OSError as error:
            log.debug("the offered shelf is not here: %s", error)
            return None
        if shelf is None:
            return None
        if not _shows(shelf, offer):
            log.warning("an offered shelf is not what it was said to be; the state comes as bytes")
            return None
        return shelf

    def knows(self, offer: ShelfOffer) -> bool:
        """Whether it is mapped already, so that `take` does not take time."""
        return (offer.name, offer.device, offer.inode) in self._known

    def _taken(self, offer: ShelfOffer) -> Shelf | None:
        if not _NAME.fullmatch(offer.name) or not 0 < offer.size_bytes <= MAX_SHELF_BYTES:
            return None
        key = (offer.name, offer.device, offer.inode)
        fd = os.open(self._folder / offer.name, self._flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not _is_offered(os.fstat(fd), offer):
                return None
            if key not in self._known:
                self.forget_gone()
                while len(self._known) >= MOST_SHELVES:
                    self._known.popitem(last=False)
                shelf = self._mapped(fd, offer.size_bytes)
                if shelf is None:
                    return None
                self._known[key] = shelf
        finally:
            os.close(fd)
        self._known.move_to_end(key)
        return self._known[key]

    @property
    def _flags(self) -> int:
        # CUDA page-locks what may be written only; nothing here writes.
        return os.O_RDONLY if self._cuda_device is None else os.O_RDWR

    def _mapped(self, fd: int, size_bytes: int) -> Shelf | None:
        """None where CUDA would refuse every copy out of it, as `Arena` has it."""
        protection = mmap.PROT_READ if self._cuda_device is None else mmap.PROT_READ | mmap.PROT_WRITE
        passed_by = []
        for _ in range(PIN_TRIES):
            # Page tables are made now, without the interpreter's lock, or each piece's first reader would make them.
            whole = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
            memory: Bytes = np.frombuffer(whole, dtype=np.uint8)
            if self._cuda_device is None:
                return Shelf(memory, None)
            try:
                return Shelf(memory, pin(memory.ctypes.data, size_bytes, self._cuda_device))
            except PartlyPinned:
                passed_by.append(memory)  # kept, so that the next try lies elsewhere
        log.warning("CUDA counts every place for a shelf as partly pinned; the state comes as bytes")
        return None

    def __len__(self) -> int:
        return len(self._known)

    def forget_gone(self) -> None:
        """What is mapped of engines that have ended would keep their memory."""
        for key in [key for key in self._known if not (self._folder / key[0]).exists()]:
            del self._known[key]


class SourceShelves:
    """The same on an event loop, which looks every GONE_LOOK_S whether their engines are still there."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._mapping = asyncio.Lock()
        self._look: asyncio.TimerHandle | None = None

    async def take(self, offer: ShelfOffer | None) -> Shelf | None:
        """As `Shelves.take`."""
        if offer is None:
            return None
        async with self._mapping:
            if self._shelves.knows(offer):
                return self._shelves.take(offer)
            shelf = await asyncio.to_thread(self._shelves.take, offer)
        self._look_later()
        return shelf

    def _look_later(self) -> None:
        if self._look is None and len(self._shelves):
            self._look = asyncio.get_running_loop().call_later(GONE_LOOK_S, self._look_now)

    def _look_now(self) -> None:
        self._look = None
        if not self._mapping.locked():  # or a thread is at them, which looks itself
            self._shelves.forget_gone()
        self._look_later()


def _is_offered(found: os.stat_result, offer: ShelfOffer) -> bool:
    """Only our own user's file, which nobody else may write, of just the announced size."""
    return (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & 0o077
        and (found.st_dev, found.st_ino, found.st_size) == (offer.device, offer.inode, offer.size_bytes)
    )


def _shows(shelf: Shelf, offer: ShelfOffer) -> bool:
    if not 0 <= offer.nonce_at <= shelf.memory.nbytes - NONCE_BYTES:
        return False
    there = shelf.memory[offer.nonce_at : offer.nonce_at + NONCE_BYTES].tobytes()
    return secrets.compare_digest(there.hex().encode(), offer.nonce.encode())

"""The store's memory: slabs, each one pre-faulted file on tmpfs with a table of records and, behind it, the bytes they describe.

Why slabs that are mapped once and cut again and again, and not a file for each object: measured on this kind of machine (tmpfs,
4 KiB pages, 8 MiB objects, copies into the store in GB/s): into recycled pages of a slab 11.6; into fresh pages 1.4; a recycled
file that is opened and mapped for each object 2.3; a fresh file 1.2; `write` into a fresh file 2.5. Allocating pages ahead with
posix_fallocate runs at 4.3 GB/s, once. So pages are taken a slab at a time, touched once, and never given back before the end.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from engines.store.config import MIN_SLAB_BYTES
from engines.store.extents import PAGE_BYTES, FreeRanges, pages
from engines.store.records import (
    MARKS_OFFSET,
    NAME_OFFSET,
    RECORD_BYTES,
    STATE_OFFSET,
    Name,
    Record,
    State,
    pack_marks,
    pack_name,
    pack_place,
    read_record,
)

SUFFIX = ".slab"
# A chunk is framed with its size in 31 bits.
MAX_FRAMED_BYTES = (1 << 31) - 1
_HEADER = struct.Struct("<8sQQ")  # magic, size of the file, records
_SUM = struct.Struct("<Q")
# Counts up with whatever its records or checksums mean; slabs of another number are given up at the start.
_MAGIC = b"HYSLAB02"
# One record for so many bytes of data: an eighth of a percent is spent on them.
BYTES_PER_RECORD = 32 << 10
# Objects below this lie at a slab's end, apart from the large ones.
SMALL_BYTES = 64 << 10


class TmpfsFull(Exception):
    """The file system has no room for another slab."""


@dataclass(frozen=True)
class Slot:
    """A place in a slab: a record and the range it describes. Never the same twice, since generations only grow."""

    slab: Slab
    index: int
    offset: int
    length: int
    generation: int

    @property
    def file_offset(self) -> int:
        return self.slab.data_offset + self.offset

    @property
    def view(self) -> memoryview:
        """The bytes themselves, writable."""
        return self.slab.data[self.offset : self.offset + self.length]


class Slab:
    """One mapped file. Records are written through the mapping; see engines/store/records.py for the order."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is no whole slab."""
        self.path = path
        self.file = path.open("r+b", buffering=0)
        self.size_bytes = os.fstat(self.file.fileno()).st_size
        head = self.file.read(_HEADER.size + _SUM.size)
        if (
            len(head) < _HEADER.size + _SUM.size
            or xxhash.xxh3_64_intdigest(head[: _HEADER.size]) != _SUM.unpack_from(head, _HEADER.size)[0]
        ):
            self.file.close()
            raise ValueError(f"{path.name} has no sound header")
        magic, size_bytes, self.records = _HEADER.unpack_from(head)
        self.data_offset = _data_offset(self.records)
        if magic != _MAGIC or size_bytes != self.size_bytes or self.data_offset >= size_bytes:
            self.file.close()
            raise ValueError(f"{path.name} is not as long as its header says")
        self._map = mmap.mmap(self.file.fileno(), self.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        whole = memoryview(self._map)
        self._table = whole[PAGE_BYTES : PAGE_BYTES + self.records * RECORD_BYTES]
        self.data = whole[self.data_offset :]
        self.free = FreeRanges(len(self.data))
        self.free_records = list(range(self.records - 1, -1, -1))

    def close(self) -> None:
        """The mapping itself goes with the last view of it."""
        self.file.close()

    # --- records --------------------------------------------------------------------------------

    def take(self, length: int, generation: int, deadline: float, now: float) -> Slot | None:
        """A RESERVED slot of `length` bytes; None without room."""
        if not self.free_records:
            return None
        offset = self.free.take(pages(length), from_end=length < SMALL_BYTES)
        if offset is None:
            return None
        slot = Slot(self, self.free_records.pop(), offset, length, generation)
        record = self._record(slot.index)
        place = pack_place(generation, offset, length)
        record[: len(place)] = place
        record[MARKS_OFFSET:] = pack_marks(deadline, now)
        record[STATE_OFFSET] = State.RESERVED
        return slot

    def publish(self, slot: Slot, name: Name, now: float) -> None:
        record = self._record(slot.index)
        section = pack_name(name, slot.generation)
        record[NAME_OFFSET : NAME_OFFSET + len(section)] = section
        record[MARKS_OFFSET:] = pack_marks(0.0, now)
        record[STATE_OFFSET] = State.PUBLISHED

    def mark(self, slot: Slot, leased_until: float, used_at: float) -> None:
        self._record(slot.index)[MARKS_OFFSET:] = pack_marks(leased_until, used_at)

    def let_die(self, slot: Slot) -> None:
        """No longer an object; its bytes stay until `release`."""
        self._record(slot.index)[STATE_OFFSET] = State.DYING

    def release(self, slot: Slot) -> None:
        self._record(slot.index)[STATE_OFFSET] = State.FREE
        self.free.give(slot.offset, pages(slot.length))
        self.free_records.append(slot.index)

    def recover(self) -> Iterator[tuple[Slot, Record]]:
        """All records that are not free, their ranges taken. Once, before anything else; `free_records` is right at the end."""
        states = np.frombuffer(self._table, dtype=np.uint8)[STATE_OFFSET::RECORD_BYTES]
        used: set[int] = set()
        for index in np.flatnonzero(states).tolist():
            record = read_record(self._record(index))
            if record is None or not self.free.take_at(record.offset, pages(record.length)):
                # Half-written before it counted, or damaged: nothing says whose bytes these are.
                self._record(index)[STATE_OFFSET] = State.FREE
                continue
            used.add(index)
            yield Slot(self, index, record.offset, record.length, record.generation), record
        self.free_records = [index for index in self.free_records if index not in used]

    def _record(self, index: int) -> memoryview:
        return self._table[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]


@dataclass(frozen=True)
class Growth:
    """A slab that is not made yet; its bytes count already."""

    folder: Path
    number: int
    size_bytes: int

    def make(self) -> Slab:
        """Any thread. Raises TmpfsFull."""
        return Slab(_make_slab(self.folder, self.number, self.size_bytes))


class Slabs:
    """All slabs of one folder, together at most `room_bytes`; more are made as long as there is room."""

    def __init__(self, folder: Path, room_bytes: int, slab_bytes: int) -> None:
        self.folder = folder
        self._room_bytes = room_bytes
        self._slab_bytes = slab_bytes
        self.slabs: list[Slab] = []
        self.unsound: list[str] = []
        self._generation = 0
        self._growing_bytes = 0

    def recover(self) -> list[tuple[Slot, Record]]:
        """Opens what a former process left, and removes what it had not finished."""
        found: list[tuple[Slot, Record]] = []
        for draft in self.folder.glob(f"*{SUFFIX}.new"):
            draft.unlink()
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            try:
                slab = Slab(path)
            except ValueError as error:
                self.unsound.append(str(error))
                path.unlink()
                continue
            self.slabs.append(slab)
            found += slab.recover()
        self._generation = max((slot.generation for slot, _ in found), default=0)
        return found

    def close(self) -> None:
        for slab in self.slabs:
            slab.close()

    # --- room -----------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, tables included."""
        return sum(slab.size_bytes for slab in self.slabs)

    @property
    def free_bytes(self) -> int:
        """Free bytes of the slabs that exist."""
        return sum(slab.free.free_bytes for slab in self.slabs)

    @property
    def largest_bytes(self) -> int:
        """The largest object that an empty slab takes."""
        size = min(self._slab_bytes, self._room_bytes) // PAGE_BYTES * PAGE_BYTES
        return min(size - _data_offset(_records_of(size)), MAX_FRAMED_BYTES)

    def take(self, length: int, deadline: float, now: float) -> Slot | None:
        """A slot in the slabs that exist; None where none has the room in one piece."""
        for slab in self.slabs:
            slot = slab.take(length, self._generation + 1, deadline, now)
            if slot is not None:
                self._generation += 1
                return slot
        return None

    def grow(self, length: int) -> bool:
        """Another slab that takes an object of `length` bytes. False where the capacity is reached.

        Raises TmpfsFull where the file system is; then a smaller slab was tried too.
        """
        size = self._next_size()
        if size - _data_offset(_records_of(size)) < length:
            return False
        while True:
            try:
                self.slabs.append(Slab(_make_slab(self.folder, len(self.slabs), size)))
                return True
            except TmpfsFull:
                size = size // 2 // PAGE_BYTES * PAGE_BYTES
                if size < MIN_SLAB_BYTES or size - _data_offset(_records_of(size)) < length:
                    raise

    def growth(self) -> Growth | None:
        """A slab to be made ahead of need, in another thread: taking its pages lasts. None where the capacity is reached, or
        one is being made. Ended by `end_growth` on this one."""
        size = self._next_size()
        if not size or self._growing_bytes:
            return None
        self._growing_bytes = size
        return Growth(self.folder, len(self.slabs), size)

    def end_growth(self, slab: Slab | None) -> None:
        self._growing_bytes = 0
        if slab is not None:
            self.slabs.append(slab)

    def _next_size(self) -> int:
        left = (self._room_bytes - self.size_bytes - self._growing_bytes) // PAGE_BYTES * PAGE_BYTES
        size = min(self._slab_bytes // PAGE_BYTES * PAGE_BYTES, left)
        return size if size >= MIN_SLAB_BYTES else 0


def _records_of(size_bytes: int) -> int:
    return max(64, size_bytes // BYTES_PER_RECORD)


def _data_offset(records: int) -> int:
    return PAGE_BYTES + pages(records * RECORD_BYTES)


def _make_slab(folder: Path, number: int, size_bytes: int) -> Path:
    """A new slab file with all its pages, there only once it is whole. Its name was never another's."""
    path = folder / f"{number:04}-{secrets.token_hex(8)}{SUFFIX}"
    draft = path.with_name(f"{path.name}.new")
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Takes the pages now: a full tmpfs is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, size_bytes)
        head = _HEADER.pack(_MAGIC, size_bytes, _records_of(size_bytes))
        os.pwrite(fd, head + _SUM.pack(xxhash.xxh3_64_intdigest(head)), 0)
        draft.rename(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise TmpfsFull(f"{folder} has no room for {size_bytes} bytes: {error.strerror}") from error
        raise
    finally:
        os.close(fd)
    return path

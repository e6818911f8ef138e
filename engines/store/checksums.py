"""What bytes are known by: BLAKE3, which names them everywhere, and a checksum of 128 bits for processes of one host.

The checksum is XXH3 of up to STRETCH_BYTES; of more, it is XXH3 of the row of checksums of all stretches of that length, the
last one shorter. So several threads can share a large piece, on whatever machine it is made or looked at. Neither function
holds the interpreter's lock while it works. Any thread may call them.
"""

from __future__ import annotations

import os
import threading
from itertools import count
from queue import SimpleQueue

import blake3
import xxhash

STRETCH_BYTES = 4 << 20
# Memory gives more than one thread takes, but a few take all of it; and others want to compute meanwhile.
MOST_HELPERS = 7
# Waking helpers takes longer than to go through less than this.
LEAST_SHARED_BYTES = 2 * STRETCH_BYTES

Readable = bytes | bytearray | memoryview


def digest_of(data: Readable, helpers: int | None = None) -> bytes:
    """BLAKE3, 32 bytes: what names a piece wherever it lies, and what nobody can forge. `helpers` as for `checksum_of`."""
    if len(data) >= LEAST_SHARED_BYTES and _helpers(helpers):
        return blake3.blake3(data, max_threads=blake3.blake3.AUTO).digest()
    return blake3.blake3(data).digest()


def checksum_of(data: Readable, helpers: int | None = None) -> bytes:
    """16 bytes, as fast as memory. Enough between processes of one host that trust each other.

    `helpers`: threads that share the work with the caller's; None: as many as this machine can spare.
    """
    view = memoryview(data).cast("B")
    size = len(view)
    if size <= STRETCH_BYTES:
        return xxhash.xxh3_128_digest(view)
    stretches = -(-size // STRETCH_BYTES)
    row = _Row(view, stretches)
    if size >= LEAST_SHARED_BYTES:
        _call_helpers(row, min(_helpers(helpers), stretches - 1))
    return xxhash.xxh3_128_digest(row.made())


class _Row:
    """The checksums of all stretches, one behind the other, made by whoever comes to take the next one."""

    def __init__(self, view: memoryview, stretches: int) -> None:
        self._view = view
        self._checksums = [b""] * stretches
        # Several threads draw from these two, which the interpreter's lock keeps whole.
        self._next = iter(range(stretches))
        self._finished = count(1)
        self._failure: BaseException | None = None
        self._complete = threading.Lock()
        self._complete.acquire()

    def made(self) -> bytes:
        """On the thread that wants it, which does what no other has begun. Raises what a helper's part raised."""
        self.work()
        with self._complete:
            self._view = memoryview(b"")  # a call that comes too late must not keep the memory
        if self._failure is not None:
            raise self._failure
        return b"".join(self._checksums)

    def work(self) -> None:
        for index in self._next:
            start = index * STRETCH_BYTES
            try:
                self._checksums[index] = xxhash.xxh3_128_digest(self._view[start : start + STRETCH_BYTES])
            except BaseException as error:  # noqa: BLE001 - whoever waits for the row raises it
                self._failure = error
            if next(self._finished) == len(self._checksums):
                self._complete.release()


def _helpers(wanted: int | None = None) -> int:
    """Threads beside the caller's; none where the cores are needed for something else."""
    if wanted is not None:
        return wanted
    return min(MOST_HELPERS, max(0, (len(os.sched_getaffinity(0)) - 2) // 2))


_lock = threading.Lock()
_calls: SimpleQueue[_Row] = SimpleQueue()
_threads: list[threading.Thread] = []


def _call_helpers(row: _Row, wanted: int) -> None:
    """Calls so many. Nobody depends on their coming: who comes too late finds nothing to do."""
    for _ in range(min(wanted, MOST_HELPERS)):
        _calls.put(row)
    while len(_threads) < min(wanted, MOST_HELPERS):
        with _lock:
            if len(_threads) < MOST_HELPERS:
                thread = threading.Thread(target=_help, name=f"checksum-{len(_threads)}", daemon=True)
                _threads.append(thread)
                thread.start()


def _help() -> None:
    """For the whole process, as long as it lives; waits for nothing but its next call."""
    while True:
        _calls.get().work()


def _forget_threads() -> None:
    """In a forked process, which has none of them."""
    global _calls, _lock
    _calls, _lock = SimpleQueue(), threading.Lock()
    _threads.clear()


os.register_at_fork(after_in_child=_forget_threads)

"""What bytes are known by: BLAKE3, which names them everywhere, and a checksum of 128 bits for processes of one host.

The checksum is XXH3 of up to STRETCH_BYTES; of more, it is XXH3 of the row of checksums of all stretches of that length, the
last one shorter. So several threads can share a large piece, on whatever machine it is made or looked at. Neither function
holds the interpreter's lock while it works. Any thread may call them.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

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
    shares = min(_helpers(helpers) + 1, stretches) if size >= LEAST_SHARED_BYTES else 1
    if shares == 1:
        return xxhash.xxh3_128_digest(_row(view, 0, stretches))
    bounds = [stretches * share // shares for share in range(shares + 1)]
    others = [_pool().submit(_row, view, *bounds[share : share + 2]) for share in range(1, shares)]
    rows = [_row(view, *bounds[:2]), *(other.result() for other in others)]
    return xxhash.xxh3_128_digest(b"".join(rows))


def _row(view: memoryview, first: int, end: int) -> bytes:
    """The checksums of stretches [first, end), one behind the other."""
    starts = range(first * STRETCH_BYTES, end * STRETCH_BYTES, STRETCH_BYTES)
    return b"".join(xxhash.xxh3_128_digest(view[start : start + STRETCH_BYTES]) for start in starts)


def _helpers(wanted: int | None = None) -> int:
    """Threads beside the caller's; none where the cores are needed for something else."""
    if wanted is not None:
        return wanted
    return min(MOST_HELPERS, max(0, (len(os.sched_getaffinity(0)) - 2) // 2))


_lock = threading.Lock()
_threads: ThreadPoolExecutor | None = None


def _pool() -> ThreadPoolExecutor:
    """Made at the first need, for the whole process; its threads wait for nothing but their own work."""
    global _threads
    if _threads is None:
        with _lock:
            _threads = _threads or ThreadPoolExecutor(max(1, _helpers()), thread_name_prefix="checksum")
    return _threads

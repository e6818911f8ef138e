"""Buffers for states on their way: one pre-faulted file on tmpfs, cut into extents that are used again and again.

Fresh pages cost far more than the copy into them (1.7 s against 0.03 s for 1.4 GB), and a GPU copies twice to four times as
fast into pinned memory; so the memory is touched once, registered with CUDA where its driver is loaded, and reused. Another
process of this host may map the file by its name and read what it is told the place of.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import secrets
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("hydra.engine.arena")

FOLDER = Path("/dev/shm")
PREFIX = "hydra-arena-"
ALIGNMENT_BYTES = 4096
_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every CUDA context of the process
_ALREADY_REGISTERED = 712  # CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
PIN_TRIES = 4


class ArenaFull(Exception):
    """A buffer larger than the whole arena was asked for, or tmpfs has no room for the arena itself."""


class PartlyPinned(Exception):
    """Some of the range is pinned already, by whom nobody knows."""


class Buffer:
    """An extent of the arena. Give it back with `free`, or use it as a context manager; its bytes are then another's."""

    def __init__(self, arena: Arena, offset: int, size_bytes: int, extent_bytes: int) -> None:
        self._arena = arena
        self.offset = offset
        self._extent_bytes = extent_bytes
        self.data: NDArray[np.uint8] = arena.memory[offset : offset + size_bytes]

    def free(self) -> None:
        """Calling it twice is harmless."""
        if self._extent_bytes:
            self._arena.give_back(self.offset, self._extent_bytes)
            self._extent_bytes = 0

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


class Arena:
    """`size_bytes` of tmpfs, mapped and touched. Used on one event loop; any thread may fill the buffers it hands out.

    `cuda_device` is the GPU whose engine copies from and to it. Making one takes a while: not on a busy loop.
    """

    def __init__(self, size_bytes: int, folder: Path | None = FOLDER, cuda_device: int | None = None) -> None:
        """`folder` None: memory of this process alone. Raises ArenaFull when tmpfs has no room."""
        self.size_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.path: Path | None = None
        self._fd = -1
        self._pin: Pin | None = None
        if folder is not None:
            remove_abandoned(folder)
            self._create(folder)
        self.memory, self._pin = self._mapped(cuda_device)
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)]
        self._waiting: deque[tuple[int, asyncio.Future[Buffer]]] = deque()

    def _mapped(self, cuda_device: int | None) -> tuple[NDArray[np.uint8], Pin | None]:
        """The memory, touched, and pinned where it can be. Raises ArenaFull where CUDA would refuse every copy to or from it."""
        passed_by = []
        for _ in range(PIN_TRIES):
            memory = np.frombuffer(mmap.mmap(self._fd, self.size_bytes), dtype=np.uint8)
            memory[::ALIGNMENT_BYTES] = 0
            if cuda_device is None:
                return memory, None
            try:
                return memory, pin(memory.ctypes.data, self.size_bytes, cuda_device)
            except PartlyPinned:
                # Memory that was pinned by somebody and unmapped stood here. A copy that begins inside it and ends outside is an
                # error that ends the process; so this place is kept, unused, and the next one lies elsewhere.
                log.warning("CUDA counts a part of the arena's addresses as pinned already: it moves elsewhere")
                passed_by.append(memory)
        self.close()
        raise ArenaFull("CUDA counts every place for an arena as partly pinned")

    def _create(self, folder: Path) -> None:
        self.path = folder / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Held as long as the process lives; whoever can take it finds an abandoned file. Who looked for such a file before
            # this line took it for one, and has removed it by the time its lock can be had.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if not self.path.exists():
                os.close(self._fd)
                self._create(folder)
                return
            # Allocates the pages now: a full tmpfs is an error here and not a SIGBUS later.
            os.posix_fallocate(self._fd, 0, self.size_bytes)
        except OSError as error:
            self.path.unlink()
            os.close(self._fd)
            if error.errno != errno.ENOSPC:
                raise
            raise ArenaFull(f"{folder} has no room for {self.size_bytes} bytes") from error

    @property
    def pinned(self) -> bool:
        return self._pin is not None

    @property
    def free_bytes(self) -> int:
        return sum(size for _, size in self._free)

    async def take(self, size_bytes: int) -> Buffer:
        """A buffer of just that size, in the order of the asking; waits until one is free. Raises ArenaFull if none can be."""
        if size_bytes > self.size_bytes:
            raise ArenaFull(f"a buffer of {size_bytes} bytes does not fit the arena of {self.size_bytes}")
        if buffer := self.take_now(size_bytes):
            return buffer
        future: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().free()
            self._serve_waiting()
            raise

    def take_now(self, size_bytes: int) -> Buffer | None:
        """A buffer if one is free and nobody waits: for whoever holds others that are needed to go on."""
        return None if self._waiting else self._cut(size_bytes)

    def give_back(self, offset: int, extent_bytes: int) -> None:
        self._free.append((offset, extent_bytes))
        self._free.sort()
        joined = [self._free[0]]
        for start, size in self._free[1:]:
            last_start, last_size = joined[-1]
            if last_start + last_size == start:
                joined[-1] = (last_start, last_size + size)
            else:
                joined.append((start, size))
        self._free = joined
        self._serve_waiting()

    def close(self) -> None:
        """Removes the file. The mapping goes with the last view of it. Calling it twice is harmless."""
        if self._pin is not None:
            self._pin.release()
            self._pin = None
        if self._fd >= 0 and self.path is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _cut(self, size_bytes: int) -> Buffer | None:
        wanted = max(1, -(-size_bytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
        for index, (offset, size) in enumerate(self._free):
            if size >= wanted:
                self._free[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
                return Buffer(self, offset, size_bytes, wanted)
        return None

    def _serve_waiting(self) -> None:
        while self._waiting:
            size_bytes, future = self._waiting[0]
            if not future.done():
                buffer = self._cut(size_bytes)
                if buffer is None:
                    return
                future.set_result(buffer)
            self._waiting.popleft()


def remove_abandoned(folder: Path = FOLDER) -> int:
    """Removes arenas whose process is gone: their lock can be had. Returns how many."""
    removed = 0
    for path in folder.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone meanwhile
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed += 1
        except OSError:
            log.debug("%s is in use", path)
        finally:
            os.close(fd)
    return removed


class Pin:
    """Memory that CUDA's driver has page-locked."""

    def __init__(self, driver: ctypes.CDLL, address: int, context: ctypes.c_void_p) -> None:
        self._driver, self._address, self._context = driver, address, context

    def release(self) -> None:
        with _Current(self._driver, self._context):
            self._driver.cuMemHostUnregister(ctypes.c_void_p(self._address))


class _Current:
    """Makes a CUDA context the calling thread's, and puts the old one back."""

    def __init__(self, driver: ctypes.CDLL, context: ctypes.c_void_p) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._driver.cuCtxPushCurrent_v2(self._context)

    def __exit__(self, *_: object) -> None:
        self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def pin(address: int, size_bytes: int, cuda_device: int) -> Pin | None:
    """Page-locks the range for all of this process's CUDA contexts. None where there is no such GPU or the driver refuses; raises
    PartlyPinned, since no copy may then cross the range's ends.

    The driver is there with every GPU and has the same name for all CUDA versions, so nothing is built or linked for it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), cuda_device):
        return None
    # The primary context is the one that llama.cpp's CUDA backend uses too.
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    with _Current(driver, context):
        status = driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _PORTABLE)
    if status:
        driver.cuDevicePrimaryCtxRelease_v2(device)
        if status == _ALREADY_REGISTERED:
            raise PartlyPinned
        log.warning("CUDA did not pin the arena (error %d): transfers take longer", status)
        return None
    return Pin(driver, address, context)

"""What a transfer of state is measured against: a plain copy of as many bytes, on a GPU between it and page-locked memory."""

from __future__ import annotations

import ctypes
import time
from typing import Protocol

import numpy as np

from bench.errors import BenchError
from engines.runtime.arena import Arena
from engines.runtime.state_layout import Bytes

# A card's copies go through a buffer of at most this, again and again: their speed does not depend on more.
CARD_BUFFER_BYTES = 512 << 20


class Copies(Protocol):
    def out_s(self, size_bytes: int) -> float:
        """Seconds for a copy in the direction of an export."""

    def in_s(self, size_bytes: int, source: Bytes) -> float:
        """Seconds for a copy in the direction of an import; on a CPU of what lies in `source`."""

    def close(self) -> None:
        """Nothing is copied any more."""


class HostCopies:
    """Between memory that was touched before."""

    def __init__(self, most_bytes: int) -> None:
        self._source = np.ones(most_bytes, dtype=np.uint8)
        self._target = np.ones(most_bytes, dtype=np.uint8)

    def out_s(self, size_bytes: int) -> float:
        return self.in_s(size_bytes, self._source)

    def in_s(self, size_bytes: int, source: Bytes) -> float:
        began = time.perf_counter()
        np.copyto(self._target[:size_bytes], source[:size_bytes])
        return time.perf_counter() - began

    def close(self) -> None:
        """Its memory goes with it."""


class CardCopies:
    """Between a GPU and page-locked memory, by CUDA's driver. Raises BenchError where that cannot be had."""

    def __init__(self, most_bytes: int, device: int) -> None:
        # The engine's own kind of memory: it lies elsewhere where CUDA counts a part of its place as page-locked already.
        self._arena = Arena(min(most_bytes, CARD_BUFFER_BYTES), folder=None, cuda_device=device)
        self._memory, self._size_bytes = self._arena.memory, self._arena.size_bytes
        if not self._arena.pinned:
            self._arena.close()
            raise BenchError("CUDA does not page-lock memory here; nothing to compare with")
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._card, context, handle = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._card), ctypes.c_size_t(self._size_bytes))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise BenchError(f"{name} answered {status}")

    def out_s(self, size_bytes: int) -> float:
        return self._copy_s("cuMemcpyDtoH_v2", ctypes.c_void_p(self._memory.ctypes.data), self._card, size_bytes)

    def in_s(self, size_bytes: int, source: Bytes) -> float:
        return self._copy_s("cuMemcpyHtoD_v2", self._card, ctypes.c_void_p(self._memory.ctypes.data), size_bytes)

    def close(self) -> None:
        """Memory that is unmapped while it is page-locked leaves its addresses unfit for whoever gets them next."""
        self._call("cuMemFree_v2", self._card)
        self._arena.close()

    def _copy_s(self, name: str, target: object, source: object, size_bytes: int) -> float:
        began = time.perf_counter()
        for done in range(0, size_bytes, self._size_bytes):
            self._call(name, target, source, ctypes.c_size_t(min(self._size_bytes, size_bytes - done)))
        return time.perf_counter() - began


def copies(most_bytes: int, gpu_layers: int, device: int = 0) -> Copies:
    """A card's where the engine keeps layers on one."""
    return CardCopies(most_bytes, device) if gpu_layers else HostCopies(most_bytes)

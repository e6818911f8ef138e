"""Ranges of a sequence's positions, read where they lie and appended where they belong: what only our builds of llama.cpp
have (native/state_ranges.py).
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

BYTES = ctypes.POINTER(ctypes.c_uint8)
_get_range = getattr(llama_cpp.llama_cpp._lib, "llama_state_seq_get_range", None)
_append = getattr(llama_cpp.llama_cpp._lib, "llama_state_seq_append", None)
HAS_RANGES = _get_range is not None and _append is not None
if _get_range is not None and _append is not None:
    _get_range.argtypes = [ctypes.c_void_p, BYTES, ctypes.c_size_t, *[ctypes.c_int32] * 3, ctypes.c_uint32]
    _append.argtypes = [ctypes.c_void_p, BYTES, ctypes.c_size_t, ctypes.c_int32, ctypes.c_uint32]
    _get_range.restype = _append.restype = ctypes.c_size_t
_wipe = getattr(llama_cpp.llama_cpp._lib, "llama_state_seq_wipe", None)
HAS_WIPE = _wipe is not None
if _wipe is not None:
    _wipe.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    _wipe.restype = ctypes.c_bool


def export_range(context: Any, seq: int, start: int, end: int, buffer: NDArray[np.uint8], flags: int = 0) -> int:
    """The state of positions [start, end) of `seq` without recurrent state, where HAS_RANGES: what a sequence that shares just
    these would give, but for its number. Returns the bytes written, 0 when the buffer is too small."""
    assert _get_range is not None
    return int(_get_range(context, ctypes.cast(buffer.ctypes.data, BYTES), buffer.nbytes, seq, start, end, flags))


def append_from(context: Any, seq: int, buffer: NDArray[np.uint8], flags: int = 0) -> bool:
    """Loads what `export_range` gave behind the positions that `seq` holds; a recurrent state stays. False when llama.cpp did
    not take all of it; parts may then survive until the sequence is cleared."""
    assert _append is not None
    return int(_append(context, ctypes.cast(buffer.ctypes.data, BYTES), buffer.nbytes, seq, flags)) == buffer.nbytes > 0


def wipe(context: Any, seq: int) -> bool:
    """Empties `seq`, where HAS_WIPE, and makes zeros of what no other sequence holds of it. False when some memory cannot."""
    assert _wipe is not None
    return bool(_wipe(context, seq))

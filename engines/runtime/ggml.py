"""ggml's devices and buffer types as libllama sees them.

Every function is looked up through libllama's own handle, so it comes from the ggml that this libllama is linked to,
wherever LLAMA_CPP_LIB_PATH points; a ggml loaded by another path would be a second, empty registry.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from llama_cpp import llama_cpp as bindings

CPU, GPU, INTEGRATED_GPU, ACCELERATOR = range(4)  # enum ggml_backend_dev_type
HOST = "CPU"  # how everything in host memory is named, pinned buffers too


@dataclass(frozen=True)
class Device:
    """One entry of ggml's registry; `handle` is its ggml_backend_dev_t."""

    name: str
    kind: int
    registry: str
    handle: int


@cache
def function(name: str, result: Any, *arguments: Any) -> Any:
    """The C function `name` of libllama or of a ggml library it is linked to. Raises AttributeError."""
    found = bindings._lib[name]
    found.restype, found.argtypes = result, list(arguments)
    return found


def _text(name: str, handle: int) -> str:
    raw: bytes = function(name, ctypes.c_char_p, ctypes.c_void_p)(handle)
    return raw.decode("utf-8", "replace")


def devices() -> tuple[Device, ...]:
    """All devices in ggml's order."""
    at = function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return tuple(_device(at(index)) for index in range(function("ggml_backend_dev_count", ctypes.c_size_t)()))


def device(name: str) -> Device | None:
    """The device of that name, whatever its case; None if there is none."""
    handle = function("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)(name.encode())
    return _device(handle) if handle else None


def device_at(handle: int) -> Device:
    """The device of a ggml_backend_dev_t."""
    return _device(handle)


def _device(handle: int) -> Device:
    registry = function("ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(handle)
    kind = function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    return Device(_text("ggml_backend_dev_name", handle), kind, _text("ggml_backend_reg_name", registry), handle)


def device_memory(handle: int) -> tuple[int, int]:
    """Free and total bytes of a device; (0, 0) if it does not tell."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size_pointer = ctypes.POINTER(ctypes.c_size_t)
    function("ggml_backend_dev_memory", None, ctypes.c_void_p, size_pointer, size_pointer)(
        handle, ctypes.byref(free), ctypes.byref(total)
    )
    return free.value, total.value


def buffer_type(handle: int) -> int:
    """The default buffer type of a device."""
    return int(function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)(handle))


def buffer_type_name(buft: int) -> str:
    return _text("ggml_backend_buft_name", buft)


def is_host_buffer_type(buft: int) -> bool:
    """True for memory that the CPU addresses in llama.cpp's plain layout: ordinary, mapped or pinned."""
    return bool(function("ggml_backend_buft_is_host", ctypes.c_bool, ctypes.c_void_p)(buft))


def buffer_type_device(buft: int) -> str:
    """Name of the device whose memory a buffer of that type takes; HOST for all host memory."""
    handle = function("ggml_backend_buft_get_device", ctypes.c_void_p, ctypes.c_void_p)(buft)
    if not handle or is_host_buffer_type(buft):
        return HOST
    found = _device(handle)
    return HOST if found.kind in (CPU, ACCELERATOR) else found.name

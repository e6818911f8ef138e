"""What a projector takes of each device, before it is loaded: libmtmd plans it without its weights, in some milliseconds.

The plan is for an image of the size that libmtmd warms up with; larger ones take more for as long as they are computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import ggml, llama_log
from engines.runtime.media_projector import bindings, context_params
from engines.runtime.memory_need import HOST

_USAGE = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params"
_DEVICES_LIMIT = 256


class _Node(ctypes.Structure):
    pass


# A node of libstdc++'s std::map from a device to bytes.
_Node._fields_ = [
    ("color", ctypes.c_int),
    ("parent", ctypes.c_void_p),
    ("left", ctypes.POINTER(_Node)),
    ("right", ctypes.POINTER(_Node)),
    ("device", ctypes.c_void_p),
    ("bytes", ctypes.c_size_t),
]


class _Map(ctypes.Structure):
    _fields_ = [
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_int),
        ("root", ctypes.POINTER(_Node)),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    ]


def projector_bytes(config: EngineConfig) -> Mapping[str, int]:
    """Bytes by device of the projector of `config`, nothing without one. Raises ModelLoadFailed for what is no projector."""
    if not config.projector_path:
        return {}
    # Kept for the process: whoever looks for a form that fits asks again and again.
    key = (config.projector_path, config.gpu_layers != 0, config.devices, config.image_max_tokens)
    if key not in _found:
        _found[key] = _planned(config)
    return _found[key]


@cache
def _usage_function() -> Any:
    mtmd = bindings()
    try:
        usage = mtmd._libmtmd[_USAGE]
    except AttributeError as error:
        raise ModelLoadFailed(
            f"libmtmd has no {_USAGE}; build it from the llama.cpp that the bindings vendor"
        ) from error
    # A class with a destructor is returned through a pointer that comes before the arguments. Its few nodes stay behind.
    usage.restype, usage.argtypes = None, [ctypes.POINTER(_Map), ctypes.c_char_p, mtmd.mtmd_context_params]
    return usage


_found: dict[tuple[str, bool, tuple[str, ...], int], Mapping[str, int]] = {}


def _planned(config: EngineConfig) -> Mapping[str, int]:
    path, account = config.projector_path, _Map()
    with llama_log.collected(forward=False) as said:
        _usage_function()(ctypes.byref(account), path.encode(), context_params(config, threads=1))
    if not 0 < account.count <= _DEVICES_LIMIT:
        raise ModelLoadFailed(f"libmtmd could not plan {path}: {said.reason or 'it is no projector'}")
    return _summed(account)


def _summed(account: _Map) -> dict[str, int]:
    kinds = (ggml.GPU, ggml.INTEGRATED_GPU)
    found: dict[str, int] = {}
    waiting = [account.root]
    while waiting:
        node = waiting.pop()
        if node:
            entry = node.contents
            device = ggml.device_at(entry.device)
            name = device.name if device.kind in kinds else HOST
            found[name] = found.get(name, 0) + int(entry.bytes)
            waiting += [entry.left, entry.right]
    return found

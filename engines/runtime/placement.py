"""Where a model's weights go: the configuration as llama.cpp's model parameters, checked against this machine's devices."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import ggml

NO_DEVICES = "none"
_REMOTE_REGISTRY = "RPC"
_SPLIT_MODES = {
    "none": llama_cpp.LLAMA_SPLIT_MODE_NONE,
    "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
    "row": llama_cpp.LLAMA_SPLIT_MODE_ROW,
}


class _TensorOverride(ctypes.Structure):
    """llama_model_tensor_buft_override: tensors whose name matches the pattern get buffers of that type."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


@dataclass(frozen=True)
class Placement:
    """llama_model_params in `native`, and the arrays it points to; keep the object as long as the model lives.

    `devices` are the accelerators that can get layers, in llama.cpp's order; empty on a machine without any.
    """

    native: Any
    devices: tuple[ggml.Device, ...]
    arrays: tuple[object, ...]


def place(config: EngineConfig) -> Placement:
    """Model parameters of `config`. Raises ModelLoadFailed for what this machine lacks, before llama.cpp can abort on it."""
    chosen = _chosen_devices(config)
    if config.split_mode == "none" and chosen:
        if config.main_gpu >= len(chosen):
            raise ModelLoadFailed(f"main_gpu is {config.main_gpu}; there are {_counted(chosen)}, numbered from 0")
        used = chosen[config.main_gpu : config.main_gpu + 1]
    else:
        used = chosen
    native = llama_cpp.llama_model_default_params()
    native.n_gpu_layers = config.gpu_layers
    native.main_gpu = config.main_gpu
    native.split_mode = _SPLIT_MODES[config.split_mode]
    native.load_mtp = config.wants_draft_head
    if not config.mmap:
        native.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    arrays: list[Any] = []
    if config.devices:
        handles = [device.handle for device in chosen]
        arrays.append((ctypes.c_void_p * (len(handles) + 1))(*handles, None))
        native.devices = ctypes.addressof(arrays[-1])
    if config.tensor_split:
        arrays.append(_shares(config.tensor_split, used))
        native.tensor_split = arrays[-1]
    overrides = _overrides(config, used)
    if overrides:
        arrays.append((_TensorOverride * (len(overrides) + 1))(*overrides, _TensorOverride(None, None)))
        native.tensor_buft_overrides = ctypes.addressof(arrays[-1])
    return Placement(native, used, (*arrays, *overrides))


def expert_pattern(layers: int) -> str:
    """Matches the expert tensors of the first `layers` layers, fused and chunked forms included.

    One alternation instead of a pattern per layer: llama.cpp compiles every pattern again for every tensor.
    """
    return rf"blk\.({'|'.join(map(str, range(layers)))})\.ffn_(up|down|gate|gate_up)_(ch|)exps"


def _chosen_devices(config: EngineConfig) -> tuple[ggml.Device, ...]:
    """The accelerators named in the configuration, else those that llama.cpp would take by itself."""
    if config.devices == (NO_DEVICES,):
        return ()
    if config.devices:
        return tuple(_accelerator(name) for name in config.devices)
    known = ggml.devices()
    remote = [device for device in known if device.kind == ggml.GPU and device.registry == _REMOTE_REGISTRY]
    local = [device for device in known if device.kind == ggml.GPU and device.registry != _REMOTE_REGISTRY]
    return (*remote, *(local or [device for device in known if device.kind == ggml.INTEGRATED_GPU]))


def _accelerator(name: str) -> ggml.Device:
    device = ggml.device(name)
    if device is None:
        raise ModelLoadFailed(f"devices names {name!r}; this machine has {_names(ggml.devices())}")
    if device.kind not in (ggml.GPU, ggml.INTEGRATED_GPU):
        raise ModelLoadFailed(f"devices names {name!r}, which is no GPU; the CPU always takes what no device gets")
    return device


def _shares(shares: tuple[float, ...], devices: tuple[ggml.Device, ...]) -> Any:
    """llama.cpp copies llama_max_devices() floats, whatever the number of devices."""
    if len(shares) > len(devices):
        raise ModelLoadFailed(f"tensor_split has {len(shares)} shares; there are {_counted(devices)}")
    return (ctypes.c_float * llama_cpp.llama_max_devices())(*shares)


def _overrides(config: EngineConfig, devices: tuple[ggml.Device, ...]) -> list[_TensorOverride]:
    """Entries in order of precedence: the configuration's own come before the rule for experts."""
    entries = []
    for text in config.tensor_overrides:
        pattern, _, name = text.rpartition("=")
        device = ggml.device(name)
        # A device outside the model's own list has no place in the scheduler, which aborts the process.
        if device is None or not (device.kind == ggml.CPU or device in devices):
            usable = ", ".join([ggml.HOST, *(device.name for device in devices)])
            raise ModelLoadFailed(f"tensor_overrides sends {pattern!r} to {name!r}; this engine's devices are {usable}")
        entries.append(_TensorOverride(pattern.encode(), ggml.buffer_type(device.handle)))
    if config.cpu_moe_layers:
        host = ggml.device(ggml.HOST)
        if host is None:
            raise ModelLoadFailed("this build of ggml has no CPU device")
        pattern = expert_pattern(config.cpu_moe_layers)
        entries.append(_TensorOverride(pattern.encode(), ggml.buffer_type(host.handle)))
    return entries


def _names(devices: tuple[ggml.Device, ...]) -> str:
    return ", ".join(device.name for device in devices) or "none"


def _counted(devices: tuple[ggml.Device, ...]) -> str:
    if not devices:
        return "no GPU devices"
    return f"{len(devices)} GPU device{'s' if len(devices) > 1 else ''} ({_names(devices)})"

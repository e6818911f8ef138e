"""What this machine and its devices say of themselves right now. Reads only; knows nothing of the database.

A CPU counts as one device of its host, with the host's memory as its own, so that an engine always has a device to name.
"""

import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

logger = logging.getLogger(__name__)

_ARCH_NAMES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}
MAX_GPUS = 64


@dataclass(frozen=True)
class HostReading:
    """A machine at one moment. `cpu_count` counts the cores that this process may use."""

    cpu_model: str
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int
    load_1m: float


@dataclass(frozen=True)
class GpuReading:
    """A device at one moment; None where it does not tell."""

    kind: str
    index: int
    uuid: str
    name: str
    arch: str
    memory_total_bytes: int
    memory_used_bytes: int
    temperature_c: float | None
    utilization_percent: float | None
    power_w: float | None


def read_host() -> HostReading:
    """This machine as it is now."""
    memory = psutil.virtual_memory()
    return HostReading(
        cpu_model=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        load_1m=os.getloadavg()[0],
    )


def read_gpus() -> list[GpuReading]:
    """Every device of this machine: its CPU first, then the CUDA cards in NVML's order (none without a driver)."""
    return [_read_cpu(), *_read_cuda()]


def _cpu_model() -> str:
    return _named_cpu(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")) or platform.machine()


def _named_cpu(cpuinfo: str) -> str:
    """The processor's name. x86 says `model name`, and before it `model`, a bare number; other machines have the others only."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    names = (fields.get(key, "") for key in ("model name", "hardware", "model"))
    return next((name[:200] for name in names if name), "")


def _read_cpu() -> GpuReading:
    memory = psutil.virtual_memory()
    machine = platform.machine()
    return GpuReading(
        kind="cpu",
        index=0,
        uuid="cpu",
        name=_cpu_model(),
        arch=_ARCH_NAMES.get(machine.lower(), machine),
        memory_total_bytes=memory.total,
        memory_used_bytes=memory.total - memory.available,
        temperature_c=None,
        # Since the last call in this process: no waiting, and the first answer is 0.
        utilization_percent=psutil.cpu_percent(interval=None),
        power_w=None,
    )


@contextmanager
def _nvml() -> Iterator[bool]:
    """NVML for the duration of the block; yields False on a machine without NVIDIA's driver."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_NoPermission):
        yield False
        return
    try:
        yield True
    finally:
        pynvml.nvmlShutdown()


def _read_cuda() -> list[GpuReading]:
    readings = []
    with _nvml() as present:
        if not present:
            return []
        for index in range(min(pynvml.nvmlDeviceGetCount(), MAX_GPUS)):
            try:
                readings.append(_read_card(index))
            except pynvml.NVMLError as error:
                # One fallen card must not hide the others.
                logger.warning("GPU %d cannot be read: %s", index, error)
    return readings


def _read_card(index: int) -> GpuReading:
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(card)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    power_mw = _optional(pynvml.nvmlDeviceGetPowerUsage, card)
    utilization = _optional(pynvml.nvmlDeviceGetUtilizationRates, card)
    return GpuReading(
        kind="cuda",
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(card)),
        name=_text(pynvml.nvmlDeviceGetName(card)),
        arch=f"sm_{major}{minor}",
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        temperature_c=_optional(pynvml.nvmlDeviceGetTemperature, card, pynvml.NVML_TEMPERATURE_GPU),
        utilization_percent=None if utilization is None else float(utilization.gpu),
        power_w=None if power_mw is None else power_mw / 1000,
    )


def _optional(read: Any, *args: Any) -> Any:
    """What `read` answers, or None where the card does not support the question."""
    try:
        return read(*args)
    except pynvml.NVMLError_NotSupported:
        return None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

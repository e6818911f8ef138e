"""What this machine and its devices say of themselves right now. Reads only; knows nothing of the database.

A CPU counts as one device of its host, with the host's memory as its own, so that an engine always has a device to name.
"""

import os
import platform
import threading
from functools import cache
from pathlib import Path

import psutil

from pools.nvml import NvmlSession
from pools.readings import GpuReading, HostReading, Inventory

__all__ = ["GpuReading", "HostReading", "Inventory", "read_gpus", "read_host", "read_inventory"]

_ARCH_NAMES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}
# The names under which Linux lists a processor's own sensor.
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")


def read_inventory() -> Inventory:
    """This machine with every device: its CPU first, then the CUDA cards in NVML's order (none without a driver)."""
    cards = _nvml().read()
    host = _host_reading(cards.driver_version, cards.cuda_version, cards.problem, cards.problem_hint)
    return Inventory(host, (_read_cpu(), *cards.gpus), cards.unreadable)


def read_host() -> HostReading:
    """This machine as it is now."""
    return read_inventory().host


def read_gpus() -> list[GpuReading]:
    """Every device of this machine that answers."""
    return list(read_inventory().gpus)


@cache
def _nvml() -> NvmlSession:
    return NvmlSession()


def _host_reading(driver_version: str, cuda_version: str, problem: str, problem_hint: str) -> HostReading:
    memory = psutil.virtual_memory()
    return HostReading(
        cpu_model=_cpu_model(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        load_1m=os.getloadavg()[0],
        driver_version=driver_version,
        cuda_version=cuda_version,
        problem=problem,
        problem_hint=problem_hint,
    )


@cache
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
    clock = psutil.cpu_freq()
    return GpuReading(
        kind="cpu",
        index=0,
        uuid="cpu",
        name=_cpu_model(),
        arch=_ARCH_NAMES.get(machine.lower(), machine),
        memory_total_bytes=memory.total,
        memory_used_bytes=memory.total - memory.available,
        temperature_c=_cpu_temperature(),
        utilization_percent=_cpu_meter.percent(),
        power_w=None,
        clock_mhz=round(clock.current) if clock is not None and clock.current else None,
        clock_max_mhz=round(clock.max) if clock is not None and clock.max else None,
    )


class _CpuMeter:
    """How busy the processor was since the last question of this process; None at the first one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[float, float] | None = None

    def percent(self) -> float | None:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # A guest's time is counted in its host's as well.
        total_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        with self._lock:
            last, self._last = self._last, (idle_s, total_s)
        if last is None or total_s <= last[1]:
            return None
        return round(100 * min(1.0, max(0.0, 1 - (idle_s - last[0]) / (total_s - last[1]))), 1)


_cpu_meter = _CpuMeter()


def _cpu_temperature() -> float | None:
    """The hottest of the processor's sensors; None on machines (and in containers) that show none."""
    sensors = psutil.sensors_temperatures()
    readings = [sensor.current for name in _CPU_SENSORS for sensor in sensors.get(name, ())]
    return max(readings, default=None)

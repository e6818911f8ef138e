"""NVIDIA's cards as NVML describes them: each reading whole, each failure with a hint, nothing guessed.

`NvmlSession` keeps the library open, since opening it can wake every card of a machine. The library is passed in: the module
`pynvml`, or something that answers like it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from pools.readings import MAX_GPUS, MAX_PROCESSES, GpuProcess, GpuReading, UnreadableGpu

logger = logging.getLogger(__name__)

RETRY_S = 30.0
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
# The oldest CUDA whose builds run on these architectures; a driver knows the CUDA it was made for and older ones.
NEEDED_CUDA: tuple[tuple[str, tuple[int, int]], ...] = (("sm_12", (12, 8)), ("sm_10", (12, 8)), ("sm_", (11, 0)))

# What to do about a failure, by NVML's number for it.
_HINTS: dict[int, tuple[str, str]] = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "a card of NVIDIA is on the bus, but its driver's library (NVML) is missing",
        "Install NVIDIA's driver; in a container, start it with access to the cards.",
    ),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "NVIDIA's driver is not loaded",
        "Load it (`modprobe nvidia`); after an update of the kernel its module may have to be built again.",
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: (
        "this user may not ask NVIDIA's driver",
        "Give the user that runs Hydra access to /dev/nvidia*.",
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "NVIDIA's library and its kernel module are of different versions",
        "Restart the machine: the driver was updated while it ran.",
    ),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (
        "NVIDIA's driver is too old to be asked",
        "Update it; version 450 or newer is needed.",
    ),
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "the card has fallen off the bus",
        "Look for Xid in the kernel's log; check power, seating and riser. A restart of the machine may bring it back.",
    ),
    pynvml.NVML_ERROR_IRQ_ISSUE: (
        "the driver cannot take the card's interrupts",
        "Check its slot and the kernel's log.",
    ),
}
# Answers that mean: this card, or this driver, does not tell.
_NOT_TOLD = frozenset(
    {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION}
)


@dataclass(frozen=True)
class Cards:
    """All cards at one moment, and the driver they were read through."""

    gpus: tuple[GpuReading, ...] = ()
    unreadable: tuple[UnreadableGpu, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    problem: str = ""
    problem_hint: str = ""


class NvmlSession:
    """The library, opened when first asked and kept open. May be used by several threads.

    What cannot be opened is tried again after RETRY_S; so is a driver that lost a card, since only a new session sees it return.
    """

    def __init__(self, library: Any = pynvml, pci_devices: Path = PCI_DEVICES) -> None:
        self._library = library
        self._pci_devices = pci_devices
        self._lock = threading.Lock()
        self._open = False
        self._opened_at = float("-inf")
        self._failure: pynvml.NVMLError | None = None

    def read(self) -> Cards:
        """Every card as it is now. Never raises NVMLError: what fails is told in the answer."""
        with self._lock:
            failure = self._opened()
            if failure is not None:
                return self._without_cards(failure)
            try:
                cards = self._read_cards()
            except pynvml.NVMLError as error:
                self.close()
                return _failed(error)
            if cards.unreadable and time.monotonic() - self._opened_at > RETRY_S:
                self.close()
            return cards

    def close(self) -> None:
        """Let the library go; the next reading opens it again."""
        if self._open:
            self._open = False
            try:
                self._library.nvmlShutdown()
            except pynvml.NVMLError as error:
                logger.warning("NVML could not be closed: %s", error)

    def _opened(self) -> pynvml.NVMLError | None:
        if self._open:
            return None
        if self._failure is not None and time.monotonic() - self._opened_at < RETRY_S:
            return self._failure
        self._opened_at = time.monotonic()
        try:
            self._library.nvmlInit()
        except pynvml.NVMLError as error:
            self._failure = error
            return error
        self._open, self._failure = True, None
        return None

    def _without_cards(self, failure: pynvml.NVMLError) -> Cards:
        # A machine without a card needs no driver.
        absent = failure.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if absent and not any(_cards_on_the_bus(self._pci_devices)):
            return Cards()
        return _failed(failure)

    def _read_cards(self) -> Cards:
        library = self._library
        driver = _text(library.nvmlSystemGetDriverVersion())
        cuda = _optional(library.nvmlSystemGetCudaDriverVersion_v2)
        cuda_version = () if cuda is None else (cuda // 1000, cuda % 1000 // 10)
        gpus, unreadable = [], []
        for index in range(min(library.nvmlDeviceGetCount(), MAX_GPUS)):
            uuid = None
            try:
                card = library.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(library.nvmlDeviceGetUUID(card))
                gpus.append(_read_card(library, card, index, uuid, cuda_version, driver))
            except pynvml.NVMLError as error:
                # One fallen card must not hide the others.
                problem, hint = _explained(error)
                unreadable.append(UnreadableGpu(index, uuid, problem, hint))
        return Cards(tuple(gpus), tuple(unreadable), driver, ".".join(map(str, cuda_version)))


def _read_card(
    library: Any, card: Any, index: int, uuid: str, cuda_version: tuple[int, ...], driver: str
) -> GpuReading:
    memory = library.nvmlDeviceGetMemoryInfo(card)
    major, minor = library.nvmlDeviceGetCudaComputeCapability(card)
    arch = f"sm_{major}{minor}"
    power_mw = _optional(library.nvmlDeviceGetPowerUsage, card)
    limit_mw = _optional(library.nvmlDeviceGetEnforcedPowerLimit, card)
    busy = _optional(library.nvmlDeviceGetUtilizationRates, card)
    problem, hint = _too_old(arch, cuda_version, driver)
    return GpuReading(
        kind="cuda",
        index=index,
        uuid=uuid,
        name=_text(library.nvmlDeviceGetName(card)),
        arch=arch,
        memory_total_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        temperature_c=_optional(library.nvmlDeviceGetTemperature, card, pynvml.NVML_TEMPERATURE_GPU),
        utilization_percent=None if busy is None else float(busy.gpu),
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        clock_mhz=_optional(library.nvmlDeviceGetClockInfo, card, pynvml.NVML_CLOCK_SM),
        clock_max_mhz=_optional(library.nvmlDeviceGetMaxClockInfo, card, pynvml.NVML_CLOCK_SM),
        pcie_generation=_optional(library.nvmlDeviceGetCurrPcieLinkGeneration, card),
        pcie_generation_max=_optional(library.nvmlDeviceGetMaxPcieLinkGeneration, card),
        pcie_width=_optional(library.nvmlDeviceGetCurrPcieLinkWidth, card),
        pcie_width_max=_optional(library.nvmlDeviceGetMaxPcieLinkWidth, card),
        processes=tuple(_processes(library, card)),
        problem=problem,
        problem_hint=hint,
    )


def _processes(library: Any, card: Any) -> Iterator[GpuProcess]:
    """Who holds the card's memory, computing or drawing; at most MAX_PROCESSES, those that hold most."""
    found: dict[int, int | None] = {}
    for ask in (library.nvmlDeviceGetComputeRunningProcesses, library.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _optional(ask, card) or ():
            found[int(process.pid)] = process.usedGpuMemory
    largest = sorted(found.items(), key=lambda item: (-(item[1] or 0), item[0]))
    for pid, memory_bytes in largest[:MAX_PROCESSES]:
        yield GpuProcess(pid, _process_name(pid), None if memory_bytes is None else int(memory_bytes))


def _process_name(pid: int) -> str:
    """The program's name; "" when NVML names a process that this container cannot see."""
    try:
        return psutil.Process(pid).name()[:100]
    except psutil.Error:
        return ""


def _too_old(arch: str, cuda_version: tuple[int, ...], driver: str) -> tuple[str, str]:
    needed = next(version for prefix, version in NEEDED_CUDA if arch.startswith(prefix))
    if not cuda_version or cuda_version >= needed:
        return "", ""
    runs, wants = ".".join(map(str, cuda_version)), ".".join(map(str, needed))
    return (
        f"driver {driver} is too old for {arch}: it runs CUDA {runs}, {wants} is needed",
        "Update NVIDIA's driver on this host.",
    )


def _optional(read: Any, *args: Any) -> Any:
    """What `read` answers, or None where card or driver do not know the question."""
    try:
        return read(*args)
    except pynvml.NVMLError as error:
        if error.value in _NOT_TOLD:
            return None
        raise


def _failed(error: pynvml.NVMLError) -> Cards:
    problem, hint = _explained(error)
    return Cards(problem=problem, problem_hint=hint)


def _explained(error: pynvml.NVMLError) -> tuple[str, str]:
    """What happened and what to do about it."""
    default = (f"NVML refuses: {error}", "Look at `nvidia-smi` and the kernel's log on this host.")
    return _HINTS.get(error.value, default)


def _cards_on_the_bus(pci_devices: Path) -> Iterator[str]:
    """PCI addresses of NVIDIA's display and compute cards, whether or not a driver has them."""
    if not pci_devices.is_dir():
        return
    for device in pci_devices.iterdir():
        try:
            vendor = (device / "vendor").read_text(encoding="ascii").strip()
            kind = (device / "class").read_text(encoding="ascii").strip()
        except OSError:
            continue  # It was unplugged this moment.
        if vendor == NVIDIA_VENDOR and kind.startswith(DISPLAY_CLASSES):
            yield device.name


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value

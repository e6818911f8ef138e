"""What probes read of a machine and its devices, as frozen values. Free of Django, and of the libraries that read them."""

from dataclasses import dataclass

MAX_GPUS = 64
MAX_PROCESSES = 32


@dataclass(frozen=True)
class HostReading:
    """A machine at one moment. `cpu_count` counts the cores that this process may use.

    `driver_version` and `cuda_version` are NVIDIA's driver's and the newest CUDA it can run, "" without one; `problem` and
    `problem_hint` say why cards that should be there cannot be read.
    """

    cpu_model: str
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int
    load_1m: float
    driver_version: str = ""
    cuda_version: str = ""
    problem: str = ""
    problem_hint: str = ""


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a device's memory. `name` is "" where the process is another container's; None: not told."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a device tells of itself; None where it does not. `problem` says what will keep it from serving, though it answers.

    PCIe: generation and width (lanes) of the link now, and the most that card and slot could have; a card at rest lowers its
    generation.
    """

    kind: str
    index: int
    name: str
    arch: str
    memory_total_bytes: int
    memory_used_bytes: int | None
    temperature_c: float | None
    utilization_percent: float | None
    power_w: float | None
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    processes: tuple[GpuProcess, ...] = ()
    problem: str = ""
    problem_hint: str = ""


@dataclass(frozen=True, kw_only=True)
class GpuReading(DeviceFacts):
    """A device at one moment. `uuid` is the driver's name for it, which stays the same wherever the card is plugged in."""

    uuid: str


@dataclass(frozen=True)
class UnreadableGpu:
    """A card that is there and does not answer: it has an index, perhaps a uuid, and no number that could be believed."""

    index: int
    uuid: str | None
    problem: str
    problem_hint: str


@dataclass(frozen=True)
class Inventory:
    """A machine and all of its devices at one moment."""

    host: HostReading
    gpus: tuple[GpuReading, ...]
    unreadable: tuple[UnreadableGpu, ...] = ()

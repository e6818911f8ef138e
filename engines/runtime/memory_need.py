"""What an engine takes of each device, and whether that fits. Plain data; knows nothing of llama.cpp."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.runtime.host_memory import Room

HOST = "CPU"
# Beside what llama.cpp plans, a GPU's driver and libraries take scratch memory while they compute.
DEVICE_MARGIN_BYTES = 512 << 20
# The interpreter, the vocabulary and what requests hold.
HOST_MARGIN_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes of one device by purpose.

    `mapped_bytes` is the part of the weights that the page cache holds and can drop. `cache_bytes` is the budget for
    parked states, host only; it is reached in use, not at load. `projector_bytes` is outside of llama.cpp's account of a
    loaded model, so it is known as planned only.
    """

    weights_bytes: int = 0
    kv_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    mapped_bytes: int = 0
    cache_bytes: int = 0
    projector_bytes: int = 0

    @property
    def loaded_bytes(self) -> int:
        """All that is taken once the model is loaded."""
        return self.weights_bytes + self.kv_bytes + self.recurrent_bytes + self.compute_bytes + self.output_bytes

    @property
    def total_bytes(self) -> int:
        return self.loaded_bytes + self.cache_bytes + self.projector_bytes

    def __add__(self, other: DeviceNeed) -> DeviceNeed:
        return DeviceNeed(*(mine + theirs for mine, theirs in zip(self._bytes(), other._bytes(), strict=True)))

    def __sub__(self, other: DeviceNeed) -> DeviceNeed:
        return self + other * -1

    def __mul__(self, times: float) -> DeviceNeed:
        return DeviceNeed(*(round(size * times) for size in self._bytes()))

    def _bytes(self) -> tuple[int, ...]:
        return dataclasses.astuple(self)

    def by_kind(self) -> dict[str, int]:
        """Bytes by purpose as metrics and messages name it; what is 0 is left out."""
        kinds = ("weights", "kv", "recurrent", "compute", "output", "cache", "projector")
        return {kind: size for kind in kinds if (size := getattr(self, f"{kind}_bytes"))}


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by device name; host memory is `CPU`, pinned buffers included.

    `estimated` says that bytes were extrapolated from fewer sequences or cells: a simulation with all of them would itself
    have taken too much memory.
    """

    devices: Mapping[str, DeviceNeed] = field(default_factory=dict)
    estimated: bool = False

    @property
    def host(self) -> DeviceNeed:
        return self.devices.get(HOST, DeviceNeed())

    @property
    def total_bytes(self) -> int:
        return sum(need.total_bytes for need in self.devices.values())


@dataclass(frozen=True)
class Shortage:
    """A device that cannot hold its part."""

    device: str
    need: DeviceNeed
    needed_bytes: int
    free_bytes: int

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {sized(size)}" for kind, size in self.need.by_kind().items())
        wanted = f"{sized(self.needed_bytes)} of {self.device} memory is needed ({parts})"
        return f"{wanted} and {sized(self.free_bytes)} is free beside the reserve"


def shortages(need: MemoryNeed, rooms: Mapping[str, Room]) -> list[Shortage]:
    """The devices whose part of `need` does not fit into their room; a device without a known room is taken to fit.

    A GPU must have free what is needed and a margin. On the host, weights that are mapped from the file are page cache:
    they count against all of the memory, since what others have cached gives way to them, and the rest against what is
    available. So a model that does not fit beside others' processes is slow, one that cannot fit at all is refused.
    """
    found = []
    for device, part in need.devices.items():
        room = rooms.get(device)
        if room is None or room.total_bytes == 0:
            continue
        if device != HOST:
            if part.total_bytes + DEVICE_MARGIN_BYTES > room.free_bytes:
                free_bytes = max(room.free_bytes - DEVICE_MARGIN_BYTES, 0)
                found.append(Shortage(device, part, part.total_bytes, free_bytes))
            continue
        kept_bytes = part.total_bytes - part.mapped_bytes
        available_bytes = max(room.free_bytes - HOST_MARGIN_BYTES, 0)
        whole_bytes = max(room.total_bytes - HOST_MARGIN_BYTES, 0)
        if kept_bytes > available_bytes:
            found.append(
                Shortage(
                    device,
                    dataclasses.replace(part, weights_bytes=part.weights_bytes - part.mapped_bytes),
                    kept_bytes,
                    available_bytes,
                )
            )
        elif part.total_bytes > whole_bytes:
            found.append(Shortage(device, part, part.total_bytes, whole_bytes))
    return found


def sized(size_bytes: int) -> str:
    """A size for people: MiB below one GiB, else GiB with one decimal."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.0f} MiB"

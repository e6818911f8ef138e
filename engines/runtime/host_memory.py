"""How much memory of this host an engine can take, and how much of it a process holds (Linux)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

UNLIMITED_BYTES = 1 << 60  # a cgroup without a limit states a number near 2^63


@dataclass(frozen=True)
class Room:
    """A device's free and total bytes. For the host free means MemAvailable: what the page cache can give back counts."""

    free_bytes: int
    total_bytes: int


def host_room(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Room:
    """The host's memory as a container limits it: the tightest cgroup above this process counts."""
    values = _kib_table(proc / "meminfo")
    room = Room(values["MemAvailable"], values["MemTotal"])
    for folder, limit_name, usage_name in _memory_cgroups(proc, cgroups):
        limit_bytes = _number(folder / limit_name)
        if limit_bytes is None or limit_bytes >= UNLIMITED_BYTES:
            continue
        used_bytes = (_number(folder / usage_name) or 0) - _inactive_file_bytes(folder)
        left_bytes = max(limit_bytes - max(used_bytes, 0), 0)
        room = Room(min(room.free_bytes, left_bytes), min(room.total_bytes, limit_bytes))
    return room


def process_resident_bytes(proc: Path = Path("/proc")) -> int:
    """Resident memory of this process: its own pages, shared memory and mapped files."""
    return _kib_table(proc / "self" / "status")["VmRSS"]


def process_anonymous_bytes(proc: Path = Path("/proc")) -> int:
    """Resident memory of this process that no file backs."""
    return _kib_table(proc / "self" / "status")["RssAnon"]


def _memory_cgroups(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    """Folders from the process's memory cgroup up to the root, with the names of their limit and usage files."""
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the host's while the mount shows only the container's own part.
        folder = root / inside.lstrip("/")
        for candidate in (folder, *folder.parents):
            if not candidate.is_relative_to(root):
                break
            found.append((candidate, *names))
    return found


def _inactive_file_bytes(folder: Path) -> int:
    """Page cache of a cgroup that can be given back at once; it counts as used there, but is not taken."""
    try:
        rows = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    values = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    """The file's number; None if it is absent or says `max`."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _kib_table(path: Path) -> dict[str, int]:
    """Bytes by name of a /proc table whose rows read `Name: 123 kB`."""
    table = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            table[name] = int(number) * 1024
    return table

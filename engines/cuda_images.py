"""Which cards a CUDA library has code for, read from the fat binaries inside it. Needs neither a card nor a toolkit.

nvcc puts its output into the ELF section `.nv_fatbin`: headers of 16 bytes (magic, version, own size, size of what follows),
each followed by entries, one per architecture, that say what they are (machine code or PTX) and for which one. The code itself
may be compressed, the entries' headers never are. `cuobjdump --list-elf` reads the same.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

FATBIN_MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, version, header bytes, payload bytes, …, architecture, …, flags
_OF_ONE_CAPABILITY = 1 << 20  # compiled as sm_120a: runs on that capability and on no other
_ALIGNMENT = 8
MAX_ENTRIES = 1 << 20


class ImagesUnreadable(ValueError):
    """The file is no ELF file of this machine's kind, or its fat binaries are not laid out as they should be."""


@dataclass(frozen=True)
class CudaImages:
    """What a library has code for, as (compute capability, bound to it alone): (86, False), (120, True)."""

    machine_code: frozenset[tuple[int, bool]]
    ptx: frozenset[tuple[int, bool]]

    def runs_on(self, capability: int) -> bool:
        """Whether a card can run it: machine code of the same major version and no newer minor one, or older PTX."""
        return any(
            own == capability or (not alone and own // 10 == capability // 10 and own < capability)
            for own, alone in self.machine_code
        ) or any(own == capability or (not alone and own < capability) for own, alone in self.ptx)

    @property
    def names(self) -> tuple[str, ...]:
        """As cuobjdump calls them: sm_86, sm_120a for machine code, compute_86 for PTX."""
        return (*_names("sm", self.machine_code), *_names("compute", self.ptx))


def capability(arch: str) -> int | None:
    """86 for sm_86; None for what is no card's architecture."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", arch)
    return int(match[1]) if match else None


def read_images(path: Path) -> CudaImages:
    """The images inside an ELF file, none if it has no CUDA code. Raises ImagesUnreadable, OSError."""
    machine_code: set[tuple[int, bool]] = set()
    ptx: set[tuple[int, bool]] = set()
    with path.open("rb") as file:
        try:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ImagesUnreadable(f"{path} is empty") from error
        with content:
            try:
                for offset, size in _sections(content):
                    _walk(content, offset, offset + size, machine_code, ptx)
            except (struct.error, IndexError) as error:
                raise ImagesUnreadable(f"{path} ends in the middle of its sections") from error
    return CudaImages(frozenset(machine_code), frozenset(ptx))


def _sections(content: mmap.mmap) -> list[tuple[int, int]]:
    """Offset and size of the sections that hold fat binaries."""
    if content[:6] != b"\x7fELF\x02\x01":
        raise ImagesUnreadable("it is no 64-bit little-endian ELF file")
    table = struct.unpack_from("<Q", content, 0x28)[0]
    entry_bytes, count, names_index = struct.unpack_from("<HHH", content, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", content, table + index * entry_bytes) for index in range(count)]
    if not headers:
        return []
    names = headers[names_index][4]
    found = []
    for name, _type, _flags, _address, offset, size in headers:
        start = names + name
        end = content.find(b"\0", start)
        if content[start:end] in _SECTIONS:
            found.append((offset, size))
    return found


def _names(kind: str, images: frozenset[tuple[int, bool]]) -> list[str]:
    return [f"{kind}_{own}{'a' if alone else ''}" for own, alone in sorted(images)]


def _walk(
    content: mmap.mmap, offset: int, end: int, machine_code: set[tuple[int, bool]], ptx: set[tuple[int, bool]]
) -> None:
    """Takes every fat binary between the offsets; between two of them stand only zeros that fill up to the alignment."""
    if end > len(content):
        raise ImagesUnreadable("a section of fat binaries reaches beyond the file")
    entries = 0
    while offset + _HEADER.size <= end:
        magic, _version, header_bytes, size = _HEADER.unpack_from(content, offset)
        if magic != FATBIN_MAGIC:
            offset += _ALIGNMENT
            continue
        entry, last = offset + header_bytes, offset + header_bytes + size
        while entry + _ENTRY.size <= min(last, end):
            kind, _version, entry_bytes, payload_bytes, arch, flags = _ENTRY.unpack_from(content, entry)
            entries += 1
            if not entry_bytes or entries > MAX_ENTRIES:
                raise ImagesUnreadable("a fat binary has an entry without a header")
            if kind in (PTX, MACHINE_CODE):
                (ptx if kind == PTX else machine_code).add((arch, bool(flags & _OF_ONE_CAPABILITY)))
            entry += entry_bytes + payload_bytes
        offset = max(last, offset + _HEADER.size)
        offset += -offset % _ALIGNMENT

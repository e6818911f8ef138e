"""ELF files with fat binaries inside, as nvcc leaves them, without nvcc: headers it really wrote, around code that is zeros."""

from __future__ import annotations

import struct
from pathlib import Path

# Entries' headers as nvcc 11.8.89 (sm_60) and 13.0.88 (the others) wrote them for a kernel of one line, by what cuobjdump
# called them.
RECORDED = {
    "sm_60": "0200010140000000a80b0000000000000000000000000000070001003c00000000000000000000001100000000000000"
    "00000000000000000000000000000000",
    "sm_86": "0200010140000000e8110000000000000000000000000000080001005600000000000000000000001100000000000000"
    "00000000000000000000000000000000",
    "sm_90a": "020001014000000048140000000000000000000000000000080001005a00000000000000000000001100100000000000"
    "00000000000000000000000000000000",
    "compute_90": "010001015000000018010000000000001501000040000000000009005a00000000000000000000001180000000000000"
    "0000000000000000e40200000000000048000000000000000000000000000000",
    "sm_120a": "0200010170000000b01e0000000000000000000040000000080001007800000000000000000000001100100100000000"
    "000000000000000000000000000000004800000024000000000209010002020100020505000307010102030000020601"
    "00040b08005000000000000000000000",
    "sm_121": "0200010170000000b01e0000000000000000000040000000080001007900000000000000000000001100000100000000"
    "000000000000000000000000000000004800000024000000000209000002020100020505000307010102030000020601"
    "00040b08000000000000000000000000",
}
_MAGIC = 0xBA55ED50


def fat_binary(*names: str) -> bytes:
    """One fat binary with an entry for each architecture."""
    body = b""
    for name in names:
        header = bytes.fromhex(RECORDED[name])
        body += header + bytes(struct.unpack_from("<Q", header, 8)[0])
    return struct.pack("<IHHQ", _MAGIC, 1, 16, len(body)) + body


def elf(sections: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file that has these sections and nothing else."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    contents = [*sections.values(), names]
    offset, offsets = 64, []
    body = b""
    for content in contents:
        padding = -(offset + len(body)) % 8
        body += bytes(padding)
        offsets.append(offset + len(body))
        body += content
    table = offset + len(body) + (-(offset + len(body)) % 8)
    body += bytes(table - offset - len(body))
    rows = [bytes(64)]
    for name, content, at in zip((*sections, ".shstrtab"), contents, offsets, strict=True):
        where = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(struct.pack("<IIQQQQIIQQ", where, 1, 0, 0, at, len(content), 0, 0, 8, 0))
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    count = len(rows)
    head = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, count, count - 1)
    return identity + head + body + b"".join(rows)


def write_library(folder: Path, *names: str) -> Path:
    """libggml-cuda.so with code for these architectures, each kernel in a fat binary of its own as nvcc -rdc=false does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "libggml-cuda.so"
    kernels = fat_binary(*names) + bytes(8) + fat_binary(*names) if names else b""
    path.write_bytes(elf({".text": b"\x90" * 40, ".nv_fatbin": kernels, ".data": bytes(24)}))
    return path

"""An object's header in its slab: where it lies, what it is, and whether it counts.

Written so that a process killed between any two writes leaves either the old truth or the new one: the sections carry their
own checksums, and one byte, the state, is written last.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

RECORD_BYTES = 256
MAX_LOGICAL_KEY_BYTES = 128
KINDS = ("raw", "block", "tail", "checkpoint", "draft", "state")
MANIFEST_KIND = "manifest"
_KIND_NUMBERS = {kind: number for number, kind in enumerate((*KINDS, MANIFEST_KIND))}
_KIND_NAMES = {number: kind for kind, number in _KIND_NUMBERS.items()}

STATE_OFFSET = 4
_MAGIC = b"HYS1"
_PLACE = struct.Struct("<4s4xQQQ")  # magic, state and padding, generation, offset, length
_NAME = struct.Struct("<BxH4xd32s16s128s")  # kind, key length, modified, digest, checksum, logical key
_SUM = struct.Struct("<Q")
_MARKS = struct.Struct("<dd")  # leased until, used at
_PLACE_END = _PLACE.size + _SUM.size
_NAME_END = _PLACE_END + _NAME.size + _SUM.size
MARKS_OFFSET = RECORD_BYTES - _MARKS.size


class State(IntEnum):
    """FREE room counts for nothing; RESERVED is being written; PUBLISHED is an object; DYING was one and is still being read."""

    FREE = 0
    RESERVED = 1
    PUBLISHED = 2
    DYING = 3


@dataclass(frozen=True)
class Name:
    """What an object is. `modified` in seconds since 1970; `checksum` is for readers of this host (checksums.py)."""

    kind: str
    digest: bytes
    checksum: bytes
    logical_key: str = ""
    modified: float = 0.0


@dataclass(frozen=True)
class Record:
    """`offset` is in the slab's data; `leased_until` and `used_at` in seconds since the machine's boot."""

    state: State
    generation: int
    offset: int
    length: int
    leased_until: float
    used_at: float
    name: Name | None = None


def pack_place(generation: int, offset: int, length: int) -> bytes:
    """The first section with the state FREE; what a reservation is."""
    place = _PLACE.pack(_MAGIC, generation, offset, length)
    return place + _SUM.pack(xxhash.xxh3_64_intdigest(place))


def pack_name(name: Name, generation: int) -> bytes:
    """The second section. Bound to the generation, so that it never counts for another occupant of the record."""
    key = name.logical_key.encode()
    fields = _NAME.pack(_KIND_NUMBERS[name.kind], len(key), name.modified, name.digest, name.checksum, key)
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields, seed=generation & (1 << 63) - 1))


def pack_marks(leased_until: float, used_at: float) -> bytes:
    return _MARKS.pack(leased_until, used_at)


NAME_OFFSET = _PLACE_END


def read_record(raw: memoryview) -> Record | None:
    """The record in `raw`; None where its first section is not sound. A name that is not sound is left out."""
    state = raw[STATE_OFFSET]
    place = bytearray(raw[: _PLACE.size])
    place[STATE_OFFSET] = 0
    if (
        xxhash.xxh3_64_intdigest(bytes(place)) != _SUM.unpack_from(raw, _PLACE.size)[0]
        or state not in State.__members__.values()
    ):
        return None
    magic, generation, offset, length = _PLACE.unpack(place)
    if magic != _MAGIC:
        return None
    leased_until, used_at = _MARKS.unpack_from(raw, MARKS_OFFSET)
    return Record(State(state), generation, offset, length, leased_until, used_at, _read_name(raw, generation))


def _read_name(raw: memoryview, generation: int) -> Name | None:
    fields = bytes(raw[_PLACE_END : _PLACE_END + _NAME.size])
    (expected,) = _SUM.unpack_from(raw, _PLACE_END + _NAME.size)
    if xxhash.xxh3_64_intdigest(fields, seed=generation & (1 << 63) - 1) != expected:
        return None
    kind, key_bytes, modified, digest, checksum, key = _NAME.unpack(fields)
    return Name(_KIND_NAMES[kind], digest, checksum, key[:key_bytes].decode(), modified)


assert _NAME_END <= MARKS_OFFSET

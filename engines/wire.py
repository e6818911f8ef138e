"""The binary protocol of engines and stores: the one definition of its numbers, headers, limits and frames.

Pure: bytes in, dataclasses out; every size is checked before anything of that size is kept. The JSON of each operation stands
in `engines/wire_json.py` and `engines/wire_store.py`; docs/rpc-protocol.md says all of it in prose, and a test compares the two.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import parse_qsl, urlencode

from engines.errors import InvalidRequest, ProtocolBroken

PROTOCOL_VERSION = 1
MAGIC = 0x4859  # on the wire 59 48

_REQUEST = struct.Struct("<HBBHQH")
_RESPONSE = struct.Struct("<IQ")
_FRAME = struct.Struct("<I")
REQUEST_HEADER_BYTES = _REQUEST.size
RESPONSE_HEADER_BYTES = _RESPONSE.size
FRAME_HEADER_BYTES = _FRAME.size

STREAMED = (1 << 64) - 1
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TRACE_BYTES = (1 << 16) - 1
MAX_META_BYTES = (1 << 24) - 1
MAX_FRAME_BYTES = 1 << 24
MAX_HELLO_BYTES = 4096
MAX_CONFIGURE_BYTES = 1 << 16
MAX_JSON_BYTES = 1 << 25
MAX_STATE_BYTES = 1 << 36
MAX_OBJECT_BYTES = 1 << 32
# A refused request's payload up to this size is read and dropped, and the connection goes on; behind a larger one it is closed.
MAX_DRAINED_BYTES = 1 << 24

MAX_SLOT_DIGITS = 4
NONCE_BYTES = 32


class Status(IntEnum):
    OK = 0
    NOT_FOUND = 1
    ERROR = 2
    PARTIAL = 3
    BUSY = 4
    BAD_REQUEST = 5
    NOT_IMPLEMENTED = 6


_STATUSES = frozenset(int(status) for status in Status)


class Opcode(IntEnum):
    PUT = 0x01
    GET = 0x02
    DEL = 0x03
    STAT = 0x04
    LIST = 0x05
    PUT_CHUNKED = 0x10
    GET_CHUNKED = 0x11
    SYNC_MISSING = 0x12
    PUSH_CHUNKS = 0x13
    PUT_META = 0x14
    PUT_MANIFEST = 0x15
    STATE_GET = 0x30
    STATE_PUT = 0x31
    STATE_META = 0x32
    GET_MANIFEST = 0x33
    HANDOFF = 0x34
    ADOPT = 0x35
    ADOPT_BLOCK = 0x36
    ADOPT_REST = 0x37
    ADOPT_ASK = 0x38
    CONFIGURE = 0x40
    INFO = 0x41
    PREFILL = 0x42
    DECODE = 0x43
    SET_EXPERT_MODE = 0x44
    SWAP_QUANT = 0x45
    PIPELINE_ATTACH = 0x46
    HELLO = 0x70
    RESERVE = 0x71
    COMMIT = 0x72
    LEASE = 0x73
    RELEASE = 0x74
    SNAPSHOTS = 0x75


@dataclass(frozen=True)
class Operation:
    """What holds for every request of one opcode: who serves it (engine, store, both), its key, its largest payload."""

    opcode: Opcode
    served_by: str
    key: str
    max_payload_bytes: int


OPERATIONS: dict[int, Operation] = {
    int(operation.opcode): operation
    for operation in (
        Operation(Opcode.PUT, "store", "object", MAX_OBJECT_BYTES),
        Operation(Opcode.GET, "store", "object", 0),
        Operation(Opcode.DEL, "store", "object", 0),
        Operation(Opcode.STAT, "store", "object", 0),
        Operation(Opcode.LIST, "store", "prefix", 0),
        Operation(Opcode.PUT_CHUNKED, "store", "object", MAX_OBJECT_BYTES),
        Operation(Opcode.GET_CHUNKED, "store", "object", MAX_JSON_BYTES),
        Operation(Opcode.SYNC_MISSING, "store", "object", MAX_JSON_BYTES),
        Operation(Opcode.PUSH_CHUNKS, "store", "object", MAX_OBJECT_BYTES),
        Operation(Opcode.PUT_META, "store", "object", MAX_JSON_BYTES),
        Operation(Opcode.PUT_MANIFEST, "store", "object", MAX_JSON_BYTES),
        Operation(Opcode.STATE_GET, "engine", "slot", 0),
        Operation(Opcode.STATE_PUT, "engine", "slot", MAX_STATE_BYTES),
        Operation(Opcode.STATE_META, "engine", "slot", 0),
        Operation(Opcode.GET_MANIFEST, "store", "object", 0),
        Operation(Opcode.HANDOFF, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.ADOPT, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.ADOPT_BLOCK, "engine", "handoff", MAX_STATE_BYTES),
        Operation(Opcode.ADOPT_REST, "engine", "handoff", MAX_STATE_BYTES),
        Operation(Opcode.ADOPT_ASK, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.CONFIGURE, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.INFO, "both", "none", 0),
        Operation(Opcode.PREFILL, "engine", "none", MAX_JSON_BYTES),
        Operation(Opcode.DECODE, "engine", "none", MAX_JSON_BYTES),
        Operation(Opcode.SET_EXPERT_MODE, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.SWAP_QUANT, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.PIPELINE_ATTACH, "engine", "none", MAX_CONFIGURE_BYTES),
        Operation(Opcode.HELLO, "both", "none", MAX_HELLO_BYTES),
        Operation(Opcode.RESERVE, "store", "logical key", MAX_CONFIGURE_BYTES),
        Operation(Opcode.COMMIT, "store", "ticket", MAX_CONFIGURE_BYTES),
        Operation(Opcode.LEASE, "store", "object", MAX_JSON_BYTES),
        Operation(Opcode.RELEASE, "store", "ticket", 0),
        Operation(Opcode.SNAPSHOTS, "store", "prefix", MAX_CONFIGURE_BYTES),
    )
}


def operation_of(opcode: int) -> Operation | None:
    """The operation of a number from the wire; None for a number that this version does not know."""
    return OPERATIONS.get(opcode)


# --- heads ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestHead:
    """A request without its payload, which follows in `payload_bytes` bytes. `opcode` may be a number nobody knows."""

    opcode: int
    flags: int = 0
    key: bytes = b""
    trace: bytes = b""
    payload_bytes: int = 0

    def encode(self) -> bytes:
        """Raises InvalidRequest for a key or trace that is too long for its length field."""
        for name, value, limit in (("key", self.key, MAX_KEY_BYTES), ("trace id", self.trace, MAX_TRACE_BYTES)):
            if len(value) > limit:
                raise InvalidRequest(f"The {name} has {len(value)} bytes; at most {limit} can be sent.")
        header = _REQUEST.pack(MAGIC, self.opcode, self.flags, len(self.key), self.payload_bytes, len(self.trace))
        return header + self.key + self.trace

    @property
    def key_text(self) -> str:
        return _text(self.key, "key")

    @property
    def trace_id(self) -> str:
        return _text(self.trace, "trace id")


@dataclass(frozen=True)
class SlotKey:
    """The key of a state operation: a slot's number in decimal, then perhaps `?` and options as in a URL's query."""

    slot_id: int
    form: str | None = None
    fingerprint: str | None = None
    erase_existing: bool = True

    def encode(self) -> bytes:
        options = {"form": self.form, "fingerprint": self.fingerprint}
        given = {name: value for name, value in options.items() if value is not None}
        if not self.erase_existing:
            given["erase_existing"] = "0"
        return f"{self.slot_id}{'?' if given else ''}{urlencode(given)}".encode()

    @classmethod
    def parse(cls, key: str) -> SlotKey:
        """Raises InvalidRequest for a number that is none, an unknown or repeated option, and a value that cannot be."""
        number, _, query = key.partition("?")
        if not (number.isascii() and number.isdigit() and len(number) <= MAX_SLOT_DIGITS):
            raise InvalidRequest(
                f"The key must begin with a slot's number in decimal, not {number[:40]!r}.", param="key"
            )
        try:
            pairs = parse_qsl(query, strict_parsing=bool(query), max_num_fields=8, errors="strict")
        except ValueError as error:
            raise InvalidRequest(f"The key's options cannot be read: {error}.", param="key") from error
        options = dict(pairs)
        erase = options.pop("erase_existing", "1")
        if erase not in ("0", "1") or len(dict(pairs)) != len(pairs):
            raise InvalidRequest("erase_existing is 0 or 1, and no option of a key comes twice.", param="key")
        unknown = sorted(set(options) - {"form", "fingerprint"})
        if unknown:
            raise InvalidRequest(f"The key has unknown options: {', '.join(unknown)[:80]}.", param="key")
        return cls(int(number), options.get("form"), options.get("fingerprint"), erase == "1")


@dataclass(frozen=True)
class ResponseHead:
    """An answer without its payload. `meta` is a JSON object or empty; `payload_bytes` STREAMED means frames follow."""

    status: Status
    meta: bytes = b""
    payload_bytes: int = 0

    def encode(self) -> bytes:
        """Raises ProtocolBroken for meta that is too long for its length field: our own fault, so nothing is sent."""
        if len(self.meta) > MAX_META_BYTES:
            raise ProtocolBroken(f"The answer's meta has {len(self.meta)} bytes; at most {MAX_META_BYTES} can be sent.")
        return _RESPONSE.pack(self.status | len(self.meta) << 8, self.payload_bytes) + self.meta

    @property
    def is_streamed(self) -> bool:
        return self.payload_bytes == STREAMED


class RequestDecoder:
    """Takes bytes as they come until one RequestHead is whole; what follows it is left to the caller.

    Raises ProtocolBroken for a wrong magic as soon as its two bytes are there, and never keeps more than a head's bytes.
    """

    def __init__(self) -> None:
        self.head: RequestHead | None = None
        self._buffer = bytearray()
        self._wanted = REQUEST_HEADER_BYTES

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Adds bytes; returns how many of them belonged to the head."""
        used = 0
        while self.head is None and used < len(data):
            taken = data[used : used + self._wanted - len(self._buffer)]
            self._buffer += taken
            used += len(taken)
            if len(self._buffer) >= 2 and int.from_bytes(self._buffer[:2], "little") != MAGIC:
                raise ProtocolBroken(
                    f"A request begins with {bytes(self._buffer[:2]).hex(' ')}, which is not the protocol's."
                )
            if len(self._buffer) == self._wanted:
                self._advance()
        return used

    def _advance(self) -> None:
        _, opcode, flags, key_bytes, payload_bytes, trace_bytes = _REQUEST.unpack_from(self._buffer)
        self._wanted = REQUEST_HEADER_BYTES + key_bytes + trace_bytes
        if len(self._buffer) < self._wanted:
            return
        body = bytes(self._buffer[REQUEST_HEADER_BYTES:])
        self.head = RequestHead(opcode, flags, body[:key_bytes], body[key_bytes:], payload_bytes)


class ResponseDecoder:
    """Takes bytes as they come until one ResponseHead is whole. Raises ProtocolBroken for a status nobody knows and for meta
    beyond `max_meta_bytes`, before any of it is kept."""

    def __init__(self, max_meta_bytes: int = MAX_META_BYTES) -> None:
        self.head: ResponseHead | None = None
        self._max_meta_bytes = max_meta_bytes
        self._buffer = bytearray()
        self._wanted = RESPONSE_HEADER_BYTES

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Adds bytes; returns how many of them belonged to the head."""
        used = 0
        while self.head is None and used < len(data):
            taken = data[used : used + self._wanted - len(self._buffer)]
            self._buffer += taken
            used += len(taken)
            if len(self._buffer) == self._wanted:
                self._advance()
        return used

    def _advance(self) -> None:
        word, payload_bytes = _RESPONSE.unpack_from(self._buffer)
        status, meta_bytes = word & 0xFF, word >> 8
        if status not in _STATUSES:
            raise ProtocolBroken(f"An answer has the status {status}, which is not the protocol's.")
        if meta_bytes > self._max_meta_bytes:
            raise ProtocolBroken(
                f"An answer announces {meta_bytes} bytes of meta; at most {self._max_meta_bytes} are taken."
            )
        self._wanted = RESPONSE_HEADER_BYTES + meta_bytes
        if len(self._buffer) == self._wanted:
            self.head = ResponseHead(Status(status), bytes(self._buffer[RESPONSE_HEADER_BYTES:]), payload_bytes)


def _text(raw: bytes, what: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The {what} is not UTF-8: byte {error.start} is invalid.") from error


# --- streamed answers -----------------------------------------------------------------------------

END_OF_FRAMES = _FRAME.pack(0)


def frame(data: bytes) -> bytes:
    """One frame of a streamed answer: its length and its bytes. Raises ProtocolBroken for an empty or too long one."""
    if not 0 < len(data) <= MAX_FRAME_BYTES:
        raise ProtocolBroken(f"A frame has 1 to {MAX_FRAME_BYTES} bytes, not {len(data)}.")
    return _FRAME.pack(len(data)) + data


class FrameDecoder:
    """Takes a streamed answer's bytes as they come and hands out whole frames; `ended` after the zero length.

    Raises ProtocolBroken for a frame beyond `max_frame_bytes`, before any of it is kept.
    """

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.frames: list[bytes] = []
        self.ended = False
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()
        self._wanted = FRAME_HEADER_BYTES
        self._in_body = False

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Adds bytes; appends to `frames` what became whole; returns how many bytes were used (less than all after the end)."""
        used = 0
        while not self.ended and used < len(data):
            taken = data[used : used + self._wanted - len(self._buffer)]
            self._buffer += taken
            used += len(taken)
            if len(self._buffer) == self._wanted:
                self._advance()
        return used

    def take(self) -> list[bytes]:
        frames, self.frames = self.frames, []
        return frames

    def _advance(self) -> None:
        whole = bytes(self._buffer)
        self._buffer.clear()
        if self._in_body:
            self.frames.append(whole)
            self._in_body, self._wanted = False, FRAME_HEADER_BYTES
            return
        (length,) = _FRAME.unpack(whole)
        if length > self._max_frame_bytes:
            raise ProtocolBroken(f"A frame announces {length} bytes; at most {self._max_frame_bytes} are taken.")
        self.ended, self._in_body, self._wanted = length == 0, length > 0, length or FRAME_HEADER_BYTES


# --- the shared secret ----------------------------------------------------------------------------


def hello_proof(secret: str, side: str, nonce: bytes, challenge: bytes) -> bytes:
    """What `side` ("client" or "server") shows to prove that it knows the secret: an HMAC-SHA256 of both sides' random bytes.

    The side is part of it, so that nobody can hand a proof back to the one who made it.
    """
    message = f"hydra-rpc/{PROTOCOL_VERSION} {side}\0".encode() + nonce + challenge
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()


def proves(shown: bytes, secret: str, side: str, nonce: bytes, challenge: bytes) -> bool:
    """Whether `shown` is that proof; takes the same time wherever it differs."""
    return hmac.compare_digest(shown, hello_proof(secret, side, nonce, challenge))

"""The forms in which a state is sent: our own stream of digested pieces, and two that foreign systems know.

* `stream`: magic, version, manifest length and digest; the manifest; then each piece behind its BLAKE3 digest. It can be
  written and read piece by piece, and says all that is needed to go on elsewhere.
* `v2`: version byte 2, tokens, optional checkpoint, llama.cpp's whole state, optional logits; the layout of the system that
  Hydra reimplements. `raw`: llama.cpp's whole state alone. Both are layer-major, so they are put together in memory, and name
  no model: who sends one must say its fingerprint.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterable, Callable

from engines.errors import StateInvalid
from engines.runtime.state_layout import MAGIC, StateLayout
from engines.runtime.state_snapshot import MAX_MANIFEST_BYTES, Manifest
from engines.store.checksums import checksum_of as checksum_of
from engines.store.checksums import digest_of as digest_of

FORMS = ("stream", "v2", "raw")
STREAM_MAGIC = b"HYKV"
STREAM_VERSION = 1
DIGEST_BYTES = 32
V2_VERSION = 2
# More than its counts and lengths take.
V2_HEADS_BYTES = 1024
RAW_MAGIC = struct.pack("<I", MAGIC)
_PRELUDE = struct.Struct("<4sHHI32s")


Proof = Callable[[memoryview], bytes]


def is_quick(prove: Proof) -> bool:
    """Whether it takes hardly longer than to read the bytes."""
    return prove is checksum_of


class ChunkReader:
    """Exact counts of bytes out of chunks of any size. Raises StateInvalid where they end too early."""

    def __init__(self, chunks: AsyncIterable[bytes]) -> None:
        self._chunks = aiter(chunks)
        self._left = memoryview(b"")
        self.read_bytes = 0

    async def read(self, count: int) -> bytes:
        found = bytearray(count)
        await self.read_into(memoryview(found))
        return bytes(found)

    async def read_into(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            if not len(self._left):
                await self._next(len(target) - done)
            taken = min(len(self._left), len(target) - done)
            target[done : done + taken] = self._left[:taken]
            self._left = self._left[taken:]
            done += taken
        self.read_bytes += done

    async def read_rest(self, most_bytes: int, begun: bytes) -> bytearray:
        """All that is left behind `begun`, in memory. Raises StateInvalid beyond `most_bytes`."""
        found = bytearray(begun)
        while True:
            found += self._left
            self.read_bytes += len(self._left)
            self._left = memoryview(b"")
            if len(found) > most_bytes:
                raise StateInvalid(f"The state has more than the {most_bytes} bytes that it may have here.")
            try:
                self._left = memoryview(await anext(self._chunks))
            except StopAsyncIteration:
                return found

    async def expect_end(self) -> None:
        while not len(self._left):
            try:
                self._left = memoryview(await anext(self._chunks))
            except StopAsyncIteration:
                return
        raise StateInvalid("More bytes follow the end of the state.")

    async def _next(self, missing: int) -> None:
        try:
            self._left = memoryview(await anext(self._chunks))
        except StopAsyncIteration:
            raise StateInvalid(
                f"The state ends {missing} bytes before the end of a piece, after {self.read_bytes} bytes."
            ) from None


def largest_foreign_bytes(layout: StateLayout, context_tokens: int, vocabulary: int) -> int:
    """What v2 takes at most of a slot's whole context: the state, a checkpoint beside it, token ids and a row of logits; raw is
    less."""
    part_bytes = layout.part_bytes(context_tokens)
    return (
        layout.whole_bytes(context_tokens, part_bytes) + part_bytes + 4 * (context_tokens + vocabulary) + V2_HEADS_BYTES
    )


def stream_head(manifest: Manifest) -> bytes:
    raw = manifest.to_json()
    return _PRELUDE.pack(STREAM_MAGIC, STREAM_VERSION, 0, len(raw), digest_of(raw)) + raw


async def read_stream_head(begun: bytes, reader: ChunkReader) -> Manifest:
    """The manifest of a stream whose first bytes were read. Raises StateInvalid."""
    prelude = begun + await reader.read(_PRELUDE.size - len(begun))
    magic, version, _, length, digest = _PRELUDE.unpack(prelude)
    if magic != STREAM_MAGIC or version != STREAM_VERSION:
        raise StateInvalid(f"The state is a stream of version {version}; this engine reads {STREAM_VERSION}.")
    if length > MAX_MANIFEST_BYTES:
        raise StateInvalid(f"The state's manifest has {length} bytes; at most {MAX_MANIFEST_BYTES} are read.")
    raw = await reader.read(length)
    if digest_of(raw) != digest:
        raise StateInvalid("The state's manifest was damaged on its way: it has another digest.")
    return Manifest.from_json(raw)


def form_of(begun: bytes) -> str:
    """The form of a state by its first four bytes. Raises StateInvalid."""
    if begun == STREAM_MAGIC:
        return "stream"
    if begun == RAW_MAGIC:
        return "raw"
    if begun[:1] == bytes([V2_VERSION]):
        return "v2"
    raise StateInvalid(f"The state begins with {begun.hex()}, which is no known form.")
